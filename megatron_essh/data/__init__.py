"""Token streams: text to token pairs, pairs to samples, samples to batches.

Nothing here imports PyTorch: preprocessing starts many processes.
"""

from megatron_essh.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    check_token_ids,
    token_dtype,
)
from megatron_essh.data.loader import StatefulLoader
from megatron_essh.data.packing import PackedDataset, document_ids, validation_batches
from megatron_essh.data.sidecar import read_sidecar
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer

__all__ = [
    "IndexedDataset",
    "IndexedDatasetWriter",
    "PackedDataset",
    "StatefulLoader",
    "Tokenizer",
    "build_tokenizer",
    "check_token_ids",
    "document_ids",
    "read_sidecar",
    "token_dtype",
    "validation_batches",
]
