// Sample and blend indices of packed token streams, as Megatron builds them.
//
// Two functions of plain arrays, no state: megatron_essh/data/sampling.py holds the NumPy definition of each, and the
// tests hold these to it. Arrays are taken as they are (no silent casts: an int64 array where int32 is meant is a
// TypeError), every index is checked before it is used, and the interpreter's lock is released while a loop runs.

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// A plain pointer to a one-dimensional array. The lengths of an .idx lie at byte 34 of their file, and a view of them
// is not aligned: refused here rather than read by luck.
template <typename T>
const T* values(const Array<T>& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must have one dimension");
  const T* data = array.data();
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0)
    throw std::invalid_argument(std::string(name) + " is not aligned in memory; pass a copy");
  return data;
}

// Walk the documents in order; row i is (position in document_idx, token offset in that document) where sample i
// begins. A sample takes seq_length tokens and shares one more, the last label, with the sample that follows.
template <typename Index>
void walk(const std::int32_t* sizes, std::int64_t num_sizes, const std::int32_t* document_idx, std::int64_t num_documents,
          std::int64_t seq_length, std::int64_t num_samples, Index* rows) {
  std::int64_t document = 0;  // position in document_idx
  std::int64_t offset = 0;    // tokens of that document already taken
  rows[0] = 0;
  rows[1] = 0;
  for (std::int64_t sample = 1; sample <= num_samples; ++sample) {
    std::int64_t missing = seq_length + 1;
    for (;;) {
      if (document == num_documents)
        throw std::invalid_argument("the documents end before sample " + std::to_string(sample - 1) +
                                    " does: num_epochs * tokens_per_epoch is more than they hold");
      const std::int64_t which = document_idx[document];
      if (which < 0 || which >= num_sizes)
        throw std::out_of_range("document_idx[" + std::to_string(document) + "] is " + std::to_string(which) +
                                ", and sizes has " + std::to_string(num_sizes) + " entries");
      const std::int64_t size = sizes[which];
      if (size < 0) throw std::invalid_argument("sizes[" + std::to_string(which) + "] is negative");
      const std::int64_t left = size - offset;
      if (left >= missing) {
        offset += missing - 1;  // the last token is also the first of the next sample
        break;
      }
      missing -= left;
      ++document;
      offset = 0;
    }
    rows[2 * sample] = static_cast<Index>(document);
    rows[2 * sample + 1] = static_cast<Index>(offset);
  }
}

template <typename Index>
Array<Index> sample_idx(const Array<std::int32_t>& sizes, const Array<std::int32_t>& document_idx, std::int64_t seq_length,
                        std::int64_t num_epochs, std::int64_t tokens_per_epoch) {
  if (seq_length < 1) throw std::invalid_argument("seq_length must be at least 1");
  if (num_epochs < 1) throw std::invalid_argument("num_epochs must be at least 1");
  if (tokens_per_epoch < 1) throw std::invalid_argument("tokens_per_epoch must be at least 1");
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
    walk(size, num_sizes, document, num_documents, seq_length, num_samples, out);
  }
  return rows;
}

// Offsets always fit 32 bits, as sizes do; positions in document_idx do while it is short enough.
py::array build_sample_idx(const Array<std::int32_t>& sizes, const Array<std::int32_t>& document_idx,
                           std::int64_t seq_length, std::int64_t num_epochs, std::int64_t tokens_per_epoch) {
  if (document_idx.size() <= std::numeric_limits<std::int32_t>::max())
    return sample_idx<std::int32_t>(sizes, document_idx, seq_length, num_epochs, tokens_per_epoch);
  return sample_idx<std::int64_t>(sizes, document_idx, seq_length, num_epochs, tokens_per_epoch);
}

void build_blending_indices(Array<std::int16_t>& dataset_index, Array<std::int64_t>& dataset_sample_index,
                            const Array<double>& weights, std::int32_t num_datasets, std::int64_t size) {
  if (num_datasets < 1 || num_datasets > std::numeric_limits<std::int16_t>::max())
    throw std::invalid_argument("num_datasets must lie in 1 to 32767");
  if (size < 0) throw std::invalid_argument("size must not be negative");
  const double* weight = values(weights, "weights");
  values(dataset_index, "dataset_index");
  values(dataset_sample_index, "dataset_sample_index");
  if (weights.shape(0) != num_datasets) throw std::invalid_argument("weights must have num_datasets entries");
  if (dataset_index.shape(0) < size || dataset_sample_index.shape(0) < size)
    throw std::invalid_argument("dataset_index and dataset_sample_index must have at least size entries");
  std::int16_t* chosen = dataset_index.mutable_data();  // throws where the array is read-only
  std::int64_t* position = dataset_sample_index.mutable_data();
  Array<std::int64_t> counts(static_cast<py::ssize_t>(num_datasets));
  std::int64_t* count = counts.mutable_data();
  py::gil_scoped_release unlocked;
  for (std::int32_t d = 0; d < num_datasets; ++d) count[d] = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    // The dataset that is furthest behind its share; a tie goes to the lowest index.
    const double drawn = i > 1 ? static_cast<double>(i) : 1.0;
    std::int32_t best = 0;
    double furthest = weight[0] * drawn - static_cast<double>(count[0]);
    for (std::int32_t d = 1; d < num_datasets; ++d) {
      const double behind = weight[d] * drawn - static_cast<double>(count[d]);
      if (behind > furthest) {
        best = d;
        furthest = behind;
      }
    }
    chosen[i] = static_cast<std::int16_t>(best);
    position[i] = count[best]++;
  }
}

}  // namespace

PYBIND11_MODULE(_index, module) {
  module.doc() = "Sample and blend indices of packed token streams.";
  module.def("build_sample_idx", &build_sample_idx, py::arg("sizes").noconvert(), py::arg("document_idx").noconvert(),
             py::arg("seq_length"), py::arg("num_epochs"), py::arg("tokens_per_epoch"),
             "Where each sample begins: [samples + 1, 2], int32, or int64 where document_idx needs it.");
  module.def("build_sample_idx_int64", &sample_idx<std::int64_t>, py::arg("sizes").noconvert(),
             py::arg("document_idx").noconvert(), py::arg("seq_length"), py::arg("num_epochs"),
             py::arg("tokens_per_epoch"), "The same, in int64 whatever the length of document_idx.");
  module.def("build_blending_indices", &build_blending_indices, py::arg("dataset_index").noconvert(),
             py::arg("dataset_sample_index").noconvert(), py::arg("weights").noconvert(), py::arg("num_datasets"),
             py::arg("size"),
             "Fill, in place, which dataset each of `size` draws takes and its position in that dataset.");
}
