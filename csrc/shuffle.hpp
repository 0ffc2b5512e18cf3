// NumPy's legacy shuffle, draw for draw: the order of documents and samples that Megatron's seeds stand for.
//
// numpy.random.RandomState.shuffle swaps element i, from the last down to the second, with a partner drawn from 0 to
// i: words of a Mersenne twister, masked to the bits of i, until one is small enough. Both are reproduced here. The
// partners are known before the swaps, so the memory that each will touch is asked for a few hundred swaps ahead;
// NumPy waits for it at every single one.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

// MT19937 over a state that the caller owns: 624 words and how many of them are used up.
class MersenneTwister {
 public:
  MersenneTwister(std::uint32_t* words, int used) : words_(words), used_(used) {}

  int used() const { return used_; }

  std::uint32_t next() {
    if (used_ == kWords) renew();
    std::uint32_t y = words_[used_++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

  // Uniform over 0 to `largest`.
  std::uint32_t up_to(std::uint32_t largest) {
    if (largest == 0) return 0;
    const std::uint32_t mask = ~std::uint32_t{0} >> __builtin_clz(largest);
    for (;;) {
      const std::uint32_t drawn = next() & mask;
      if (drawn <= largest) return drawn;
    }
  }

  static constexpr int kWords = 624;

 private:
  static std::uint32_t twisted(std::uint32_t high, std::uint32_t low, std::uint32_t far) {
    const std::uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ (y >> 1) ^ ((~(y & 1u) + 1u) & 0x9908b0dfu);
  }

  void renew() {
    constexpr int kFar = 397;
    int k = 0;
    for (; k < kWords - kFar; ++k) words_[k] = twisted(words_[k], words_[k + 1], words_[k + kFar]);
    for (; k < kWords - 1; ++k) words_[k] = twisted(words_[k], words_[k + 1], words_[k + kFar - kWords]);
    words_[kWords - 1] = twisted(words_[kWords - 1], words_[0], words_[kFar - 1]);
    used_ = 0;
  }

  std::uint32_t* words_;
  int used_;
};

// Shuffles values[0, count), count at most 2^32.
template <typename Value>
void shuffle_values(Value* values, std::int64_t count, MersenneTwister& random) {
  constexpr int kAhead = 256;
  std::uint32_t partners[kAhead];
  for (std::int64_t last = count - 1; last > 0;) {
    const int drawn = static_cast<int>(std::min<std::int64_t>(kAhead, last));
    for (int k = 0; k < drawn; ++k) {
      partners[k] = random.up_to(static_cast<std::uint32_t>(last - k));
      __builtin_prefetch(values + partners[k], 1);
    }
    for (int k = 0; k < drawn; ++k) std::swap(values[last - k], values[partners[k]]);
    last -= drawn;
  }
}
