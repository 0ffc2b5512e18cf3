// Products y = x W^T of a decode step for up to 16 rows of x: the weights stream through shared memory.
//
// A block takes a run of tiles of 8 weight rows. One warp asks for tile after tile, each row by one bulk copy, as far
// ahead as there is room; it begins before the kernel ahead of this one has ended, for weights depend on nothing. The
// other warps share the inputs: each keeps its part of x in registers, multiplies it by its part of a tile in matrix
// units, and leaves the sums in shared memory, where two warps, another two for each tile, add them up in their order.
//
// Built for one number of inputs, a multiple of 32: -DINPUTS=2048.

#include <cuda_bf16.h>
#include <cstdint>

constexpr int ROWS = 8;    // of weights in a tile, as many as a matrix instruction takes
constexpr int BATCH = 16;  // rows of x that it takes
constexpr int WARPS = 8;   // that compute; one more asks for weights
constexpr int COMPUTING = 32 * WARPS;
constexpr int THREADS = COMPUTING + 32;
constexpr int MOST_STAGES = 16;

constexpr int GROUP = 32;  // inputs that a warp takes at a time: 8 a thread, four threads for each row
constexpr int GROUPS = INPUTS / GROUP;
constexpr int OWN_GROUPS = (GROUPS + WARPS - 1) / WARPS;
constexpr int ROW_BYTES = 2 * INPUTS;
// Rows lie 64 bytes past a multiple of 128 apart: two of them share no bank.
constexpr int PITCH = ROW_BYTES + (ROW_BYTES % 128 ? 0 : 64);
constexpr int STAGE_BYTES = ROWS * PITCH;
static_assert(INPUTS % GROUP == 0, "inputs come in groups of 32");
static_assert(PITCH % 128 == 64, "see PITCH");

struct Params {
  const __nv_bfloat16* x;   // [batch, INPUTS]
  const float* x_squares;   // [x_tiles, batch], or null: sums of squares by which rows of the result are scaled
  const __nv_bfloat16* w;   // [rows, INPUTS]
  void* y;                  // [batch, rows], or of units [batch, rows / 2]
  int32_t batch, rows, x_tiles, stages;
  float eps;
};

__device__ uint32_t shared_address(const void* place) { return static_cast<uint32_t>(__cvta_generic_to_shared(place)); }

__device__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void barrier_wait(uint64_t* barrier, int phase) {
  asm volatile(
    "{\n"
    ".reg .pred done;\n"
    "AGAIN:\n"
    "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
    "@!done bra AGAIN;\n"
    "}" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}

// A tile's rows to a stage, one a lane; they leave the second cache first, for nobody reads them again in this step.
__device__ void fetch(const Params& p, unsigned char* stage, uint64_t* full, int tile, int lane) {
  if (lane == 0) barrier_expect(full, ROWS * ROW_BYTES);
  __syncwarp();
  if (lane >= ROWS) return;
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const __nv_bfloat16* row = p.w + static_cast<int64_t>(tile * ROWS + lane) * INPUTS;
  asm volatile(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
    "r"(shared_address(stage + lane * PITCH)), "l"(row), "n"(ROW_BYTES), "r"(shared_address(full)), "l"(policy)
    : "memory");
}

__device__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
    "{%0, %1, %2, %3};"
    : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ void meet_computing() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTING) : "memory"); }

// Weight rows row and row + 1, of which sum holds the products with row b of x.
template <bool UNITS, typename Y>
__device__ void store(const Params& p, int b, int row, float2 sum) {
  if (b >= p.batch) return;
  Y* y = static_cast<Y*>(p.y);
  if constexpr (UNITS) {
    y[static_cast<int64_t>(b) * (p.rows / 2) + row / 2] = Y(sum.x / (1.0f + __expf(-sum.x)) * sum.y);
  } else {
    y += static_cast<int64_t>(b) * p.rows + row;
    if constexpr (sizeof(Y) == 4) {
      *reinterpret_cast<float2*>(y) = sum;
    } else {
      *reinterpret_cast<__nv_bfloat162*>(y) = __floats2bfloat162_rn(sum.x, sum.y);
    }
  }
}

template <bool UNITS, typename Y>
__device__ void product(const Params& p) {
  extern __shared__ __align__(128) unsigned char stages[];
  __shared__ __align__(8) uint64_t full[MOST_STAGES], empty[MOST_STAGES];
  __shared__ float2 parts[2][WARPS][BATCH][ROWS / 2];
  __shared__ float squares[COMPUTING / BATCH][BATCH], scales[BATCH];

  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tiles = p.rows / ROWS;
  const int first = blockIdx.x * tiles / gridDim.x, end = (blockIdx.x + 1) * tiles / gridDim.x;

  if (warp == WARPS) {
    if (lane == 0) {
      for (int stage = 0; stage < p.stages; ++stage) {
        barrier_init(full + stage, 1);
        barrier_init(empty + stage, WARPS);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    int stage = 0, phase = 0;
    for (int tile = first; tile < end; ++tile) {
      if (tile == first + p.stages) __syncthreads();  // with the others, who wait for the barriers to be there
      if (tile >= first + p.stages) {
        barrier_wait(empty + stage, phase);
        if (stage == p.stages - 1) phase ^= 1;
      }
      fetch(p, stages + stage * STAGE_BYTES, full + stage, tile, lane);
      if (++stage == p.stages) stage = 0;
    }
    if (end - first <= p.stages) __syncthreads();
    return;
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  // Which input a thread holds is the same for x and W, and sums take them in any order: its eight are neighbours.
  const int row = lane / 4, eight = lane % 4;
  uint4 x[OWN_GROUPS][2];
#pragma unroll
  for (int i = 0; i < OWN_GROUPS; ++i) {
    const int group = warp + i * WARPS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int b = row + half * BATCH / 2;
      const bool there = group < GROUPS && b < p.batch;
      const __nv_bfloat16* at = p.x + static_cast<int64_t>(b) * INPUTS + group * GROUP + eight * 8;
      x[i][half] = there ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
    }
  }
  if (p.x_squares != nullptr) {
    const int b = threadIdx.x % BATCH;
    float sum = 0.0f;
    for (int tile = threadIdx.x / BATCH; tile < p.x_tiles && b < p.batch; tile += COMPUTING / BATCH) {
      sum += p.x_squares[tile * p.batch + b];
    }
    squares[threadIdx.x / BATCH][b] = sum;
    meet_computing();
    if (threadIdx.x < BATCH) {
      sum = 0.0f;
      for (int i = 0; i < COMPUTING / BATCH; ++i) sum += squares[i][threadIdx.x];
      scales[threadIdx.x] = rsqrtf(sum / INPUTS + p.eps);
    }
  } else if (threadIdx.x < BATCH) {
    scales[threadIdx.x] = 1.0f;
  }

  int stage = 0, phase = 0;
  for (int tile = first; tile < end; ++tile) {
    const int index = tile - first;
    barrier_wait(full + stage, phase);
    const unsigned char* weights = stages + stage * STAGE_BYTES + row * PITCH + 16 * eight;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int i = 0; i < OWN_GROUPS; ++i) {
      const int group = warp + i * WARPS;
      if (GROUPS % WARPS != 0 && group >= GROUPS) break;
      const uint4 w = *reinterpret_cast<const uint4*>(weights + group * (2 * GROUP));
      multiply(even, x[i][0].x, x[i][1].x, x[i][0].y, x[i][1].y, w.x, w.y);
      multiply(odd, x[i][0].z, x[i][1].z, x[i][0].w, x[i][1].w, w.z, w.w);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage);
    if (++stage == p.stages) {
      stage = 0;
      phase ^= 1;
    }
    parts[index % 2][warp][row][eight] = make_float2(even[0] + odd[0], even[1] + odd[1]);
    parts[index % 2][warp][row + BATCH / 2][eight] = make_float2(even[2] + odd[2], even[3] + odd[3]);
    meet_computing();
    const int place = static_cast<int>(threadIdx.x) - index % 4 * 64;
    if (place >= 0 && place < 64) {
      const int b = place / 4, pair = place % 4;
      float2 sum = {};
#pragma unroll
      for (int i = 0; i < WARPS; ++i) {
        sum.x += parts[index % 2][i][b][pair].x;
        sum.y += parts[index % 2][i][b][pair].y;
      }
      store<UNITS, Y>(p, b, tile * ROWS + 2 * pair, make_float2(sum.x * scales[b], sum.y * scales[b]));
    }
  }
}

#define KERNEL(name, units, type) \
  extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Params p) { product<units, type>(p); }
KERNEL(units_bf16, true, __nv_bfloat16)
KERNEL(product_bf16, false, __nv_bfloat16)
KERNEL(product_fp32, false, float)
