# Settings that the scripts beside this file share; they are read, not run. What is already set stays.
#
# H200 (8 to a node, NVLink 4, 141 GB): PyTorch for CUDA 12.8 or later, driver 570 or later.
# B300 (8 to a node, NVLink 5, 288 GB): PyTorch for CUDA 13 (its wheels hold sm_100 code that runs on sm_103; Triton
#   compiles for sm_103 itself), driver 580 or later, NCCL 2.27 or later (that of the wheel is).
# Both: one process a GPU; keep a replica's tensor-parallel ranks on one node (parallel.tensor divides the GPUs of a
#   node, and ranks are dealt out so), data parallel between nodes.

# Python, the loader's threads and the CPU side of NCCL take few cores; PyTorch would take all of them in each process.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

# A rank that fails in an exchange says where it was.
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}

# Seconds that torchrun lets its processes live after SIGTERM: they finish their step and save. Where a rank has died,
# the others end by themselves at once.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# In containers whose GPUs may not use NVLink multicast NCCL hangs or fails at its start: set this to 0 there.
# export NCCL_NVLS_ENABLE=0

# Between nodes, where NCCL takes the wrong network: name the interface for the connections that are set up first, and
# the InfiniBand devices for the data.
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7

python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)

command=${1:?pretrain or refine, then its CONFIG and options}
[ -f "$root/launch/$command.py" ] || { echo "error: $command: expected pretrain or refine" >&2; exit 2; }
shift
