"""The C++ of csrc/index.cpp."""

from typing import Any

import numpy as np
import numpy.typing as npt

def build_sample_idx(
    sizes: npt.NDArray[np.int32],
    document_idx: npt.NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    threads: int = 1,
) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]: ...
def build_sample_idx_int64(
    sizes: npt.NDArray[np.int32],
    document_idx: npt.NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    threads: int = 1,
) -> npt.NDArray[np.int64]: ...
def build_blending_indices(
    dataset_index: npt.NDArray[np.int16],
    dataset_sample_index: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    num_datasets: int,
    size: int,
) -> None: ...
def build_exhaustive_blending_indices(
    dataset_index: npt.NDArray[np.int16],
    dataset_sample_index: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    num_datasets: int,
) -> None: ...
def shuffle(array: npt.NDArray[Any], words: npt.NDArray[np.uint32], used: int) -> int: ...
def copy_samples(
    tokens: npt.NDArray[Any],
    lengths: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int32],
    rows: npt.NDArray[Any],
    slots: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> None: ...
