"""The C++ index builders (csrc/index.cpp)."""

import numpy as np
import numpy.typing as npt

def build_sample_idx(
    sizes: npt.NDArray[np.int32],
    document_idx: npt.NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]: ...
def build_sample_idx_int64(
    sizes: npt.NDArray[np.int32],
    document_idx: npt.NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
) -> npt.NDArray[np.int64]: ...
def build_blending_indices(
    dataset_index: npt.NDArray[np.int16],
    dataset_sample_index: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    num_datasets: int,
    size: int,
) -> None: ...
