"""Holding an export to its source: hashes, names, counts, and the same function, bit for bit.

Runs on the CPU in the dtype of the weights, where source and export do the same arithmetic on the same
numbers; every comparison is of bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_essh.config import ModelConfig
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.export.folder import DamagedExport, ExportRecord, find_damage, read_export, read_record
from megatron_essh.export.loading import build_model, open_tensors
from megatron_essh.export.provenance import Provenance
from megatron_essh.export.slice import kept_rows, slice_config
from megatron_essh.model.accounting import parameter_counts
from megatron_essh.model.language_model import LanguageModel

STEPS = 5
"""Tokens that the decoding check takes in one by one after the prompt."""
CHECKS = ("files", "source", "config", "names", "parameters", "tensors", "logits", "decoding")
NOT_RUN = "not run: an earlier check failed"
MOST = 2**20
"""Batches, and tokens of a sequence, that a comparison may take."""


@dataclass(frozen=True)
class Check:
    """One line of the verification."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class RandomTokens:
    """The tokens that logits are compared on: batches of 2 sequences."""

    batches: int = 4
    length: int = 128
    """Tokens of the first batch and of the decoding check; the other batches are shorter by chance."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("batches", 1, MOST), ("length", 1, MOST), ("seed", 0, 2**63 - 1)):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name}: {getattr(self, name)} must lie in {least} to {most}")

    def draw(self, model: ModelConfig) -> Iterator[Tensor]:
        """int64 [2, T] for each batch."""
        generator = torch.Generator().manual_seed(self.seed)
        for index in range(self.batches):
            tokens = int(torch.randint(1, self.length + 1, (1,), generator=generator)) if index else self.length
            yield torch.randint(model.vocab_size, (2, tokens), generator=generator)

    def draw_for_decoding(self, model: ModelConfig) -> Tensor:
        """int64 [2, length + STEPS]: a prompt and what follows it."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(model.vocab_size, (2, self.length + STEPS), generator=generator)


def verify_export(folder: Path, source: Path | None = None, tokens: RandomTokens | None = None) -> list[Check]:
    """Compare an export with the model it was cut from.

    Args:
        folder: the export.
        source: where its source is; None takes the recorded path.
        tokens: what logits are compared on; None takes the defaults.

    Returns:
        Every one of `CHECKS`, in order. A check that could not run counts as failed and says so.

    Raises:
        UserError: the folder is no export at all, or its source cannot be read.
    """
    tokens = tokens or RandomTokens()
    damage = None
    try:
        record = read_record(folder)
        damage = find_damage(folder, record)
        tensors, config, _ = read_export(
            folder, verify=False
        )  # a changed file that can be read is compared all the same
    except DamagedExport as error:
        return _give_up([Check("files", False, str(damage or error))])
    source_tensors, source_config, provenance = open_tensors(_source(folder, record, source))
    capacity = Capacity(record.channels, record.ff_width)
    checks = [
        Check("files", damage is None, str(damage or "sizes and SHA-256 as recorded")),
        _compare_source(record, provenance),
        _compare_config(config.model, source_config.model, capacity),
    ]
    if not checks[-1].passed:
        return _give_up(checks)
    try:
        model = build_model(tensors, config.model, str(folder))
    except UserError as error:
        return _give_up([*checks, Check("names", False, str(error))])
    checks.append(Check("names", True, f"{len(tensors)} tensors, none missing, none too many"))
    checks.append(_compare_counts(model, record))
    shared = build_model(source_tensors, source_config.model, provenance.path)
    checks.append(_compare_tensors(tensors, source_tensors, source_config.model, capacity))
    with torch.inference_mode():
        checks.append(_compare_logits(model, shared, capacity, tokens.draw(model.config)))
        checks.append(_compare_decoding(model, shared, capacity, tokens.draw_for_decoding(model.config)))
    return checks


def _give_up(checks: list[Check]) -> list[Check]:
    return [*checks, *(Check(name, False, NOT_RUN) for name in CHECKS[len(checks) :])]


def _source(folder: Path, record: ExportRecord, given: Path | None) -> Path:
    path = given or Path(record.source.path)
    if not path.is_dir():
        raise UserError(f"{folder}: its source {path} is not there; say where it is with --source")
    return path


def _compare_source(record: ExportRecord, source: Provenance) -> Check:
    if source.sha256 == record.source.sha256:
        return Check("source", True, f"{source.kind}, step {source.step:,} ({source.stage}), as recorded")
    return Check(
        "source",
        False,
        f"{source.path} is another model: SHA-256 {source.sha256[:12]}, recorded {record.source.sha256[:12]}; "
        "say where the source is with --source",
    )


def _compare_config(model: ModelConfig, source: ModelConfig, capacity: Capacity) -> Check:
    if not capacity.fits(source):
        return Check("config", False, f"{capacity} (channels, units) is more than the source holds")
    expected = slice_config(source, capacity)
    for field in expected.__dataclass_fields__:
        if getattr(model, field) != getattr(expected, field):
            return Check(
                "config",
                False,
                f"model.{field}: {getattr(model, field)}, should be {getattr(expected, field)}",
            )
    return Check("config", True, f"{capacity.channels} channels, {capacity.ff_width} feed-forward units")


def _compare_counts(model: LanguageModel, record: ExportRecord) -> Check:
    counted = sum(parameter.numel() for parameter in model.parameters())
    closed = parameter_counts(model.config).total
    if counted == record.parameters == closed:
        return Check("parameters", True, f"{counted:,}")
    return Check("parameters", False, f"{counted:,} counted, {record.parameters:,} recorded, {closed:,} by formula")


def _compare_tensors(
    tensors: Mapping[str, Tensor], source: Mapping[str, Tensor], model: ModelConfig, capacity: Capacity
) -> Check:
    for name, tensor in tensors.items():
        if name not in source:
            return Check("tensors", False, f"{name} is not in the source")
        rows = kept_rows(name, model, capacity)
        expected = source[name] if rows is None else source[name][:rows]
        if not _same_bits(tensor, expected):
            return Check("tensors", False, f"first difference: {name}")
    return Check("tensors", True, "bitwise the source's")


def _compare_logits(
    model: LanguageModel, shared: LanguageModel, capacity: Capacity, batches: Iterator[Tensor]
) -> Check:
    tokens = 0
    for index, tokens_BT in enumerate(batches):
        actual, expected = model(tokens_BT), shared(tokens_BT, capacity)
        if not _same_bits(actual, expected):
            return Check("logits", False, f"differ on batch {index} {_distance(actual, expected)}")
        tokens += tokens_BT.numel()
    return Check("logits", True, f"bitwise equal at {tokens:,} random tokens")


def _compare_decoding(model: LanguageModel, shared: LanguageModel, capacity: Capacity, tokens_BT: Tensor) -> Check:
    batch, total = tokens_BT.shape
    length = total - STEPS
    state = model.init_state(batch, max_length=total)
    shared_state = shared.init_state(batch, capacity, max_length=total)
    actual, state = model.prefill(tokens_BT[:, :length], state)
    expected, shared_state = shared.prefill(tokens_BT[:, :length], shared_state, capacity)
    if not _same_bits(actual, expected):
        return Check("decoding", False, f"prefill differs {_distance(actual, expected)}")
    for position in range(length, total):
        actual, state = model.step(tokens_BT[:, position], state)
        expected, shared_state = shared.step(tokens_BT[:, position], shared_state, capacity)
        if not _same_bits(actual, expected):
            return Check("decoding", False, f"step {position - length} differs {_distance(actual, expected)}")
    return Check("decoding", True, f"bitwise equal: prefill of {length}, then {STEPS} steps")


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether dtype, shape and every bit agree; NaN equals the same NaN, and 0 is not -0."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _distance(first: Tensor, second: Tensor) -> str:
    return f"(largest difference {float((first - second).abs().max()):.3g})"
