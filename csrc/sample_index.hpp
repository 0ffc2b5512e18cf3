// Where each sample begins in a stream of documents joined end to end.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.hpp"

// The lengths of document_idx[begin, end) into `lengths`; returns their sum. The loads are at random places of an
// array far larger than the caches: they are what a sample index costs. In a loop of its own, in which nothing waits
// for a length, many of them are under way at a time; the prefetch keeps it so across misses of the address cache.
inline std::int64_t gather_lengths(const std::int32_t* sizes, std::int64_t num_sizes, const std::int32_t* document_idx,
                                   std::int64_t begin, std::int64_t end, std::int64_t num_documents,
                                   std::int32_t* lengths) {
  constexpr std::int64_t kAhead = 64;
  std::int64_t sum = 0;
  for (std::int64_t position = begin; position < end; ++position) {
    const std::int64_t ahead = document_idx[std::min(position + kAhead, num_documents - 1)];
    if (ahead >= 0 && ahead < num_sizes) __builtin_prefetch(sizes + ahead);
    const std::int64_t which = document_idx[position];
    if (which < 0 || which >= num_sizes)
      throw std::out_of_range("document_idx[" + std::to_string(position) + "] is " + std::to_string(which) +
                              ", and sizes has " + std::to_string(num_sizes) + " entries");
    const std::int32_t size = sizes[which];
    if (size < 0) throw std::invalid_argument("sizes[" + std::to_string(which) + "] is negative");
    lengths[position - begin] = size;
    sum += size;
  }
  return sum;
}

// Row i is (position in document_idx, token offset in that document) where token i * seq_length of the joined documents
// lies; a token on a border belongs to the document that begins there. The documents are taken in rounds of one block a
// thread: first every thread gathers its block's lengths, then, the tokens before each block known, every thread writes
// the rows that begin in its block. The lengths wait in the thread's own cache meanwhile.
template <typename Index>
void fill_sample_index(const std::int32_t* sizes, std::int64_t num_sizes, const std::int32_t* document_idx,
                       std::int64_t num_documents, std::int64_t seq_length, std::int64_t num_samples, int threads,
                       Index* rows) {
  constexpr std::int64_t kBlock = std::int64_t{1} << 17;
  const std::int64_t block = std::min(kBlock, std::max<std::int64_t>(1, num_documents));
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(block * threads));
  std::vector<std::int64_t> before(static_cast<std::size_t>(threads) + 1);
  std::int64_t tokens = 0;  // of the rounds that are done
  const std::int64_t last_token = num_samples * seq_length;
  for (std::int64_t round = 0; round < num_documents && tokens <= last_token; round += block * threads) {
    const std::int64_t here = std::min(block * threads, num_documents - round);
    const int parts = static_cast<int>((here + block - 1) / block);
    in_parallel(parts, [&](int part) {
      const std::int64_t begin = round + part * block, end = std::min(begin + block, num_documents);
      before[static_cast<std::size_t>(part) + 1] = gather_lengths(sizes, num_sizes, document_idx, begin, end,
                                                                  num_documents, lengths.data() + part * block);
    });
    before[0] = tokens;
    for (int part = 0; part < parts; ++part)
      before[static_cast<std::size_t>(part) + 1] += before[static_cast<std::size_t>(part)];
    in_parallel(parts, [&](int part) {
      const std::int64_t begin = round + part * block, end = std::min(begin + block, num_documents);
      const std::int32_t* length = lengths.data() + part * block;
      std::int64_t start = before[static_cast<std::size_t>(part)];  // the document's first token
      std::int64_t sample = (start + seq_length - 1) / seq_length;
      std::int64_t token = sample * seq_length;  // the sample's first
      for (std::int64_t position = begin; position < end; ++position) {
        const std::int64_t after = start + length[position - begin];
        for (; token < after && token <= last_token; token += seq_length, ++sample) {
          rows[2 * sample] = static_cast<Index>(position);
          rows[2 * sample + 1] = static_cast<Index>(token - start);
        }
        start = after;
      }
    });
    tokens = before[static_cast<std::size_t>(parts)];
  }
  if (tokens <= last_token)
    throw std::invalid_argument("the documents end before sample " + std::to_string(num_samples - 1) +
                                " does: num_epochs * tokens_per_epoch is more than they hold");
  rows[0] = 0;  // even where empty documents come first
  rows[1] = 0;
}
