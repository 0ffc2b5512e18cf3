// The Python face of csrc/: orders of packed token streams as Megatron builds them, and the samples they name.
//
// Functions of plain arrays, no state: megatron_essh/data/sampling.py and packing.py hold the NumPy definition of each,
// and the tests hold these to it. Arrays are taken as they are (no silent casts: an int64 array where int32 is meant is
// a TypeError), every index is checked before it is used, and the interpreter's lock is released while a loop runs.

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "blend_index.hpp"
#include "sample_index.hpp"
#include "samples.hpp"
#include "shuffle.hpp"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
void check_vector(const Array<T>& array, const char* name, std::int64_t least = 0) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must have one dimension");
  if (array.shape(0) < least)
    throw std::invalid_argument(std::string(name) + " must have at least " + std::to_string(least) + " entries");
}

template <typename T>
void check_aligned(const Array<T>& array, const char* name) {
  if (reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) != 0)
    throw std::invalid_argument(std::string(name) + " is not aligned in memory; pass a copy");
}

// A plain pointer to a one-dimensional array. The lengths of an .idx lie at byte 34 of their file, and a view of them
// is not aligned: refused here rather than read by luck.
template <typename T>
const T* values(const Array<T>& array, const char* name, std::int64_t least = 0) {
  check_vector(array, name, least);
  check_aligned(array, name);
  return array.data();
}

// The same to write to; throws where the array is read-only.
template <typename T>
T* writable(Array<T>& array, const char* name, std::int64_t least = 0) {
  values(array, name, least);
  return array.mutable_data();
}

template <typename Index>
Array<Index> sample_idx(const Array<std::int32_t>& sizes, const Array<std::int32_t>& document_idx, std::int64_t seq_length,
                        std::int64_t num_epochs, std::int64_t tokens_per_epoch, int threads) {
  if (seq_length < 1) throw std::invalid_argument("seq_length must be at least 1");
  if (num_epochs < 1) throw std::invalid_argument("num_epochs must be at least 1");
  if (tokens_per_epoch < 1) throw std::invalid_argument("tokens_per_epoch must be at least 1");
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must lie in 1 to 1024");
  if (tokens_per_epoch > (std::numeric_limits<std::int64_t>::max() - 1) / num_epochs)
    throw std::overflow_error("num_epochs * tokens_per_epoch does not fit 64 bits");
  const std::int64_t num_samples = (num_epochs * tokens_per_epoch - 1) / seq_length;
  const std::int32_t* size = values(sizes, "sizes");
  const std::int32_t* document = values(document_idx, "document_idx");
  Array<Index> rows({static_cast<py::ssize_t>(num_samples + 1), static_cast<py::ssize_t>(2)});
  Index* out = rows.mutable_data();
  const std::int64_t num_sizes = sizes.shape(0), num_documents = document_idx.shape(0);
  {
    py::gil_scoped_release unlocked;
    fill_sample_index(size, num_sizes, document, num_documents, seq_length, num_samples, threads, out);
  }
  return rows;
}

// Offsets always fit 32 bits, as sizes do; positions in document_idx do while it is short enough.
py::array build_sample_idx(const Array<std::int32_t>& sizes, const Array<std::int32_t>& document_idx,
                           std::int64_t seq_length, std::int64_t num_epochs, std::int64_t tokens_per_epoch,
                           int threads) {
  if (document_idx.size() <= std::numeric_limits<std::int32_t>::max())
    return sample_idx<std::int32_t>(sizes, document_idx, seq_length, num_epochs, tokens_per_epoch, threads);
  return sample_idx<std::int64_t>(sizes, document_idx, seq_length, num_epochs, tokens_per_epoch, threads);
}

void check_num_datasets(std::int32_t num_datasets) {
  if (num_datasets < 1 || num_datasets > std::numeric_limits<std::int16_t>::max())
    throw std::invalid_argument("num_datasets must lie in 1 to 32767");
}

void build_blending_indices(Array<std::int16_t>& dataset_index, Array<std::int64_t>& dataset_sample_index,
                            const Array<double>& weights, std::int32_t num_datasets, std::int64_t size) {
  check_num_datasets(num_datasets);
  if (size < 0) throw std::invalid_argument("size must not be negative");
  const double* weight = values(weights, "weights");
  if (weights.shape(0) != num_datasets) throw std::invalid_argument("weights must have num_datasets entries");
  for (std::int32_t d = 0; d < num_datasets; ++d)
    if (!std::isfinite(weight[d])) throw std::invalid_argument("weights must be finite");
  std::int16_t* chosen = writable(dataset_index, "dataset_index", size);
  std::int64_t* position = writable(dataset_sample_index, "dataset_sample_index", size);
  py::gil_scoped_release unlocked;
  with_blend(num_datasets, [&](auto kind) {
    draw_by_weights<typename decltype(kind)::Blend>(weight, num_datasets, size, chosen, position);
  });
}

void build_exhaustive_blending_indices(Array<std::int16_t>& dataset_index, Array<std::int64_t>& dataset_sample_index,
                                       const Array<std::int64_t>& sizes, std::int32_t num_datasets) {
  check_num_datasets(num_datasets);
  const std::int64_t* size = values(sizes, "sizes");
  if (sizes.shape(0) != num_datasets) throw std::invalid_argument("sizes must have num_datasets entries");
  std::int64_t total = 0;
  for (std::int32_t d = 0; d < num_datasets; ++d) {
    if (size[d] < 0) throw std::invalid_argument("sizes must not be negative");
    if (size[d] > std::numeric_limits<std::int64_t>::max() - total)
      throw std::overflow_error("the sum of sizes does not fit 64 bits");
    total += size[d];
  }
  std::int16_t* chosen = writable(dataset_index, "dataset_index", total);
  std::int64_t* position = writable(dataset_sample_index, "dataset_sample_index", total);
  py::gil_scoped_release unlocked;
  with_blend(num_datasets, [&](auto kind) {
    draw_all<typename decltype(kind)::Blend>(size, num_datasets, total, chosen, position);
  });
}

template <typename Value>
int shuffle(Array<Value>& array, Array<std::uint32_t>& words, int used) {
  Value* value = writable(array, "array");
  if (array.shape(0) > (std::int64_t{1} << 32)) throw std::invalid_argument("array has more than 2**32 entries");
  std::uint32_t* word = writable(words, "words");
  if (words.shape(0) != MersenneTwister::kWords) throw std::invalid_argument("words must have 624 entries");
  if (used < 0 || used > MersenneTwister::kWords) throw std::invalid_argument("used must lie in 0 to 624");
  MersenneTwister random(word, used);
  const std::int64_t count = array.shape(0);
  py::gil_scoped_release unlocked;
  shuffle_values(value, count, random);
  return random.used();
}

template <typename Token, typename Row>
void copy_samples(const Array<Token>& tokens, const Array<std::int32_t>& lengths, const Array<std::int64_t>& offsets,
                  const Array<std::int32_t>& documents, const Array<Row>& rows, const Array<std::int64_t>& slots,
                  Array<std::int64_t>& out) {
  check_vector(tokens, "tokens");
  check_vector(lengths, "lengths");
  check_vector(offsets, "offsets", lengths.shape(0));
  if (rows.ndim() != 2 || rows.shape(1) != 2) throw std::invalid_argument("rows must be [slots + 1, 2]");
  check_aligned(rows, "rows");
  const std::int64_t* slot = values(slots, "slots");
  if (out.ndim() != 2 || out.shape(0) != slots.shape(0)) throw std::invalid_argument("out must be [slots, tokens]");
  check_aligned(out, "out");
  const Pair pair{reinterpret_cast<const unsigned char*>(tokens.data()), tokens.nbytes(),
                  reinterpret_cast<const unsigned char*>(lengths.data()),
                  reinterpret_cast<const unsigned char*>(offsets.data()), lengths.shape(0)};
  const std::int32_t* document = values(documents, "documents");
  const Row* row = rows.data();
  std::int64_t* sample = out.mutable_data();
  const std::int64_t count = slots.shape(0), wanted = out.shape(1), num_documents = documents.shape(0);
  for (std::int64_t k = 0; k < count; ++k)
    if (slot[k] < 0 || slot[k] >= rows.shape(0)) throw std::out_of_range("a slot lies outside rows");
  py::gil_scoped_release unlocked;
  for (std::int64_t k = 0; k < count; ++k)
    copy_sample<Token>(pair, document, num_documents, row[2 * slot[k]], row[2 * slot[k] + 1], wanted,
                       sample + k * wanted);
}

template <typename Token>
void define_copy_samples(py::module_& module) {
  const auto define = [&](auto function) {
    module.def("copy_samples", function, py::arg("tokens").noconvert(), py::arg("lengths").noconvert(),
               py::arg("offsets").noconvert(), py::arg("documents").noconvert(), py::arg("rows").noconvert(),
               py::arg("slots").noconvert(), py::arg("out").noconvert(),
               "Fill out[k] with the tokens that follow one another from where row slots[k] points.");
  };
  define(&copy_samples<Token, std::int32_t>);
  define(&copy_samples<Token, std::int64_t>);
}

}  // namespace

PYBIND11_MODULE(_index, module) {
  module.doc() = "Orders of packed token streams, and the samples they name.";
  module.def("build_sample_idx", &build_sample_idx, py::arg("sizes").noconvert(), py::arg("document_idx").noconvert(),
             py::arg("seq_length"), py::arg("num_epochs"), py::arg("tokens_per_epoch"), py::arg("threads") = 1,
             "Where each sample begins: [samples + 1, 2], int32, or int64 where document_idx needs it.");
  module.def("build_sample_idx_int64", &sample_idx<std::int64_t>, py::arg("sizes").noconvert(),
             py::arg("document_idx").noconvert(), py::arg("seq_length"), py::arg("num_epochs"),
             py::arg("tokens_per_epoch"), py::arg("threads") = 1,
             "The same, in int64 whatever the length of document_idx.");
  module.def("build_blending_indices", &build_blending_indices, py::arg("dataset_index").noconvert(),
             py::arg("dataset_sample_index").noconvert(), py::arg("weights").noconvert(), py::arg("num_datasets"),
             py::arg("size"),
             "Fill, in place, which dataset each of `size` draws takes and its position in that dataset.");
  module.def("build_exhaustive_blending_indices", &build_exhaustive_blending_indices,
             py::arg("dataset_index").noconvert(), py::arg("dataset_sample_index").noconvert(),
             py::arg("sizes").noconvert(), py::arg("num_datasets"),
             "The same for exactly sizes[d] draws of dataset d, in the proportion of the sizes.");
  const auto define_shuffle = [&](auto function) {
    module.def("shuffle", function, py::arg("array").noconvert(), py::arg("words").noconvert(), py::arg("used"),
               "Shuffle in place as numpy.random.RandomState does from the state (words, used); words move on in "
               "place, and how many are used is returned.");
  };
  define_shuffle(&shuffle<std::int32_t>);
  define_shuffle(&shuffle<std::uint32_t>);
  define_shuffle(&shuffle<std::int64_t>);
  define_copy_samples<std::uint8_t>(module);
  define_copy_samples<std::int8_t>(module);
  define_copy_samples<std::uint16_t>(module);
  define_copy_samples<std::int16_t>(module);
  define_copy_samples<std::int32_t>(module);
  define_copy_samples<std::int64_t>(module);
}
