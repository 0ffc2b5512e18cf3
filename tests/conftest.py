"""Small models and token pairs, as objects and as the folders that commands take, for every test that opens one."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter. It is chosen when Triton is first imported: any import below may do it.
    os.environ["TRITON_INTERPRET"] = "1"

from megatron_essh.config import (
    DataConfig,
    ElasticConfig,
    ModelConfig,
    RunConfig,
    TokenizerConfig,
    TrainingConfig,
    config_to_mapping,
)
from megatron_essh.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, token_dtype
from megatron_essh.data.sidecar import write_sidecar
from megatron_essh.data.tokenizer_reference import recorded_tokenizer, reference_to
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.training.checkpoint import save_checkpoint

ROOT = Path(__file__).resolve().parent.parent

# The tests' tensors are tiny: on more threads, here or in a process that a test starts, they mostly wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

TEXTS = (
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 3,
    "the quick brown fox \N{FOX FACE} jumps over the lazy dog; " * 4,
    "αβγ δεζ 日本語 and plain ASCII again.\n" * 3,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, visibly, what needs more CUDA devices than there are."""
    present = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), {present} present"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A claim that holds on every kind of device."""
    return str(request.param)


@pytest.fixture
def tiny_config(tmp_path: Path) -> RunConfig:
    """A byte-level model of awkward sizes: one attention layer in three, an odd value width, a padded vocabulary."""
    model = ModelConfig(
        d_model=32,
        n_layers=3,
        channels=6,
        modes=3,
        value_width=5,
        ff_width=192,
        vocab_size=264,
        attention_layers=(1,),
        window=8,
        head_dim=8,
        bank_length=64,
    )
    return RunConfig(
        model=model,
        elastic=ElasticConfig(slot_sequences=2),
        data=DataConfig(train=str(tmp_path / "data/text_document"), sequence_length=24),
        training=TrainingConfig(global_batch=2, micro_batch=2, loss_chunk=None, precision="fp32"),
    )


@pytest.fixture
def random_model() -> Callable[..., LanguageModel]:
    """Builds a model whose every parameter is random, so that no term vanishes as it does at initialisation."""

    def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
        with torch.device("meta"):
            model = LanguageModel(config)
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
        return model.requires_grad_(False)

    return build


@dataclass(frozen=True)
class Pair:
    """A token pair on disk, and what it was made of."""

    prefix: Path
    texts: tuple[str, ...]
    tokenizer: Tokenizer
    ids: list[int]


@pytest.fixture
def write_byte_pair(tmp_path: Path) -> Callable[..., Pair]:
    """Writes texts as bytes with end-of-document tokens, under `tmp_path`/data, with their sidecar."""

    def write(texts: Sequence[str] = TEXTS, name: str = "text_document") -> Pair:
        prefix = tmp_path / "data" / name
        tokenizer = build_tokenizer(TokenizerConfig(type="byte"))
        documents = [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
        with IndexedDatasetWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
            for document in documents:
                writer.add_document(document)
        ids = [token for document in documents for token in document]
        content = {
            "tokenizer": config_to_mapping(tokenizer.config),
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "padded_vocab_size": 264,
            "eod": tokenizer.eod,
            "documents": len(documents),
            "tokens": len(ids),
            "largest_id": max(ids),
            "data_fingerprint": IndexedDataset(prefix).fingerprint,
        }
        write_sidecar(prefix, content)
        return Pair(prefix, tuple(texts), tokenizer, ids)

    return write


@pytest.fixture
def byte_pair(write_byte_pair: Callable[..., Pair]) -> Pair:
    """The pair that `tiny_config` names as its training data."""
    return write_byte_pair()


@dataclass(frozen=True)
class Run:
    """A run's output folder with one checkpoint in it."""

    folder: Path
    checkpoint: Path
    model: LanguageModel
    config: RunConfig


@pytest.fixture
def write_run(tmp_path: Path, tiny_config: RunConfig, random_model: Callable[..., LanguageModel]) -> Callable[..., Run]:
    """Writes a random model as a run's checkpoint: write(name, seed=..., <model settings>)."""

    def write(
        name: str = "run",
        *,
        seed: int = 0,
        config: RunConfig = tiny_config,
        **model: object,
    ) -> Run:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))  # type: ignore[arg-type]
        built = random_model(config.model, seed)
        tensors = {f"model.{n}": p for n, p in built.named_parameters()}
        tensors["rng.torch"] = torch.get_rng_state()
        data = config.data
        tokenizer = reference_to(data.tokenizer) if data.tokenizer else recorded_tokenizer(str(data.train))
        values = {
            "stage": "pretrain",
            "step": 7,
            "config": config_to_mapping(config),
            "tokenizer": None if tokenizer is None else config_to_mapping(tokenizer),
        }
        folder = tmp_path / name
        checkpoint = save_checkpoint(folder / "checkpoints", 7, tensors, values, keep_last=1)
        return Run(folder, checkpoint, built, config)

    return write


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs one of the repository's scripts with the given words, in this process: starting PyTorch takes seconds."""

    def run(script: str, *words: object) -> Done:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        status: object = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            except SystemExit as end:
                status = end.code
        assert isinstance(status, int), status
        return Done(status, out.getvalue(), err.getvalue())

    return run


class _LargestTensor(TorchDispatchMode):
    """Watches the number of elements of every tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.fixture
def largest_tensor() -> type[_LargestTensor]:
    """`with largest_tensor() as largest:` leaves in `largest.elements` how large a tensor was made."""
    return _LargestTensor
