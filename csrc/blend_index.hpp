// Which dataset of a blend each draw takes: the one that is furthest behind its share, a tie to the lowest index.
//
// A draw waits for the one before it, so this is one thread's work; what counts is how fast one draw finds the largest
// of weight * draws - taken. Products and differences are rounded one by one, as NumPy rounds them (setup.py forbids
// the compiler to fuse them), and `taken` is kept in doubles, exact below 2^53, so that no draw converts one.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

// A blend of exactly kDatasets: everything in registers.
template <int kDatasets>
class NarrowBlend {
 public:
  NarrowBlend(const double* weights, int) { std::memcpy(weight_, weights, sizeof(weight_)); }

  int furthest_behind(double draws) const {
    int best = 0;
    double most = weight_[0] * draws - taken_[0];
    for (int d = 1; d < kDatasets; ++d) {
      const double behind = weight_[d] * draws - taken_[d];
      best = behind > most ? d : best;
      most = behind > most ? behind : most;
    }
    return best;
  }

  std::int64_t take(int dataset) {
    const double before = taken_[dataset];
    taken_[dataset] = before + 1.0;
    return static_cast<std::int64_t>(before);
  }

  // Never draw from it again.
  void close(int dataset) { taken_[dataset] = std::numeric_limits<double>::infinity(); }

 private:
  double weight_[kDatasets];
  double taken_[kDatasets] = {};
};

// A blend of any number: the largest first, four running maxima side by side in the machine's two-lane vectors, then
// the first dataset that has it.
class WideBlend {
 public:
  WideBlend(const double* weights, int num_datasets)
      : padded_((num_datasets + kStride - 1) / kStride * kStride),
        weight_(static_cast<std::size_t>(padded_), 0.0),
        taken_(static_cast<std::size_t>(padded_), 0.0) {
    std::memcpy(weight_.data(), weights, sizeof(double) * static_cast<std::size_t>(num_datasets));
    for (int d = num_datasets; d < padded_; ++d) close(d);
  }

  int furthest_behind(double draws) const {
    Pair most[4];
    for (int k = 0; k < 4; ++k) most[k] = behind(2 * k, draws);
    for (int d = kStride; d < padded_; d += kStride)
      for (int k = 0; k < 4; ++k) most[k] = larger(behind(d + 2 * k, draws), most[k]);
    const Pair both = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    const double furthest = both[0] > both[1] ? both[0] : both[1];
    int dataset = 0;
    while (weight_[static_cast<std::size_t>(dataset)] * draws - taken_[static_cast<std::size_t>(dataset)] != furthest)
      ++dataset;
    return dataset;
  }

  std::int64_t take(int dataset) {
    double& taken = taken_[static_cast<std::size_t>(dataset)];
    const double before = taken;
    taken = before + 1.0;
    return static_cast<std::int64_t>(before);
  }

  void close(int dataset) { taken_[static_cast<std::size_t>(dataset)] = std::numeric_limits<double>::infinity(); }

 private:
  static constexpr int kStride = 8;
  typedef double Pair __attribute__((vector_size(16)));

  static Pair larger(Pair a, Pair b) { return a > b ? a : b; }

  Pair behind(int first, double draws) const {
    Pair weight, taken;
    std::memcpy(&weight, weight_.data() + first, sizeof(weight));
    std::memcpy(&taken, taken_.data() + first, sizeof(taken));
    return weight * draws - taken;
  }

  int padded_;
  std::vector<double> weight_, taken_;
};

// `size` draws by `weights`: which dataset each takes, and its position in that dataset.
template <typename Blend>
void draw_by_weights(const double* weights, int num_datasets, std::int64_t size, std::int16_t* chosen,
                     std::int64_t* position) {
  Blend blend(weights, num_datasets);
  for (std::int64_t i = 0; i < size; ++i) {
    const int dataset = blend.furthest_behind(i > 1 ? static_cast<double>(i) : 1.0);
    chosen[i] = static_cast<std::int16_t>(dataset);
    position[i] = blend.take(dataset);
  }
}

// As many draws of each dataset as `sizes` says, `total` in all, in the proportion of the sizes; a dataset that is spent
// is drawn no more.
template <typename Blend>
void draw_all(const std::int64_t* sizes, int num_datasets, std::int64_t total, std::int16_t* chosen,
              std::int64_t* position) {
  if (total == 0) return;
  std::vector<double> weights(static_cast<std::size_t>(num_datasets));
  for (int d = 0; d < num_datasets; ++d)
    weights[static_cast<std::size_t>(d)] = static_cast<double>(sizes[d]) / static_cast<double>(total);
  Blend blend(weights.data(), num_datasets);
  for (int d = 0; d < num_datasets; ++d)
    if (sizes[d] == 0) blend.close(d);
  for (std::int64_t i = 0; i < total; ++i) {
    const int dataset = blend.furthest_behind(i > 1 ? static_cast<double>(i) : 1.0);
    chosen[i] = static_cast<std::int16_t>(dataset);
    position[i] = blend.take(dataset);
    if (position[i] + 1 == sizes[dataset]) blend.close(dataset);
  }
}

template <typename Kind>
struct BlendKind {
  using Blend = Kind;
};

// Calls body(BlendKind<Blend>) with the kind of blend that is fastest for `num_datasets`.
template <typename Body>
void with_blend(int num_datasets, const Body& body) {
  switch (num_datasets) {
    case 1: return body(BlendKind<NarrowBlend<1>>{});
    case 2: return body(BlendKind<NarrowBlend<2>>{});
    case 3: return body(BlendKind<NarrowBlend<3>>{});
    case 4: return body(BlendKind<NarrowBlend<4>>{});
    case 5: return body(BlendKind<NarrowBlend<5>>{});
    case 6: return body(BlendKind<NarrowBlend<6>>{});
    default: return body(BlendKind<WideBlend>{});
  }
}
