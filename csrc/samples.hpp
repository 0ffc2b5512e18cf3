// The tokens of samples, copied out of a pair's files where an order says they lie.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

// A value at any address: the columns of an .idx are not aligned in memory.
template <typename Value>
Value at(const unsigned char* column, std::int64_t index) {
  Value value;
  std::memcpy(&value, column + index * static_cast<std::int64_t>(sizeof(Value)), sizeof(value));
  return value;
}

// A pair as it lies in memory: the tokens, and each sequence's length in tokens (int32) and first byte (int64).
struct Pair {
  const unsigned char* tokens;
  std::int64_t num_bytes;
  const unsigned char* lengths;
  const unsigned char* offsets;
  std::int64_t num_sequences;
};

// One sample of `wanted` tokens that begins at `offset` of sequence documents[position] and reads on in the sequences
// that follow in `documents`. The files are mapped, and may be damaged: nothing is read beyond them.
template <typename Token>
void copy_sample(const Pair& pair, const std::int32_t* documents, std::int64_t num_documents, std::int64_t position,
                 std::int64_t offset, std::int64_t wanted, std::int64_t* out) {
  constexpr std::int64_t kBytes = sizeof(Token);
  for (std::int64_t filled = 0; filled < wanted; ++position, offset = 0) {
    if (position < 0 || position >= num_documents)
      throw std::out_of_range("a sample reads document " + std::to_string(position) + " of an order over " +
                              std::to_string(num_documents));
    const std::int64_t sequence = documents[position];
    if (sequence < 0 || sequence >= pair.num_sequences)
      throw std::out_of_range("the order names sequence " + std::to_string(sequence) + " of " +
                              std::to_string(pair.num_sequences));
    const std::int64_t length = at<std::int32_t>(pair.lengths, sequence);
    const std::int64_t taken = std::min(length - offset, wanted - filled);
    if (offset < 0 || taken < 0) throw std::out_of_range("a sample begins beyond its document's end");
    const std::int64_t first = at<std::int64_t>(pair.offsets, sequence) + offset * kBytes;
    if (taken == 0) continue;
    if (first < 0 || first > pair.num_bytes - taken * kBytes)
      throw std::out_of_range("sequence " + std::to_string(sequence) + " lies beyond the end of the .bin");
    const unsigned char* from = pair.tokens + first;
    for (std::int64_t k = 0; k < taken; ++k) out[filled + k] = static_cast<std::int64_t>(at<Token>(from, k));
    filled += taken;
  }
}
