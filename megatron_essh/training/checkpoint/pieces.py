"""What a rank holds of a parameter, whichever way a run is laid out, and how one such part goes over into another.

A part is: of the whole, dealt out unit by unit over `tp` ranks (parallel/interleave.py), the elements start:end of
rank `tp_rank`'s local part, flattened. A whole tensor, a tensor-parallel shard, a ZeRO partition and the share of a
replica that writes a half of what all replicas hold are all of that form, so that nothing else needs to know which it
was. Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_essh.parallel.interleave import Sharding, local_count
from megatron_essh.parallel.mesh import Mesh

Copies = Literal["none", "data", "tensor", "all"]
"""Which other ranks hold the very same piece: none, the other data-parallel ranks, the other tensor-parallel ranks, or
every rank."""


@dataclass(frozen=True)
class Span:
    """The elements start:end of the local part of `tp_rank`, of a tensor of `units` units of `unit` elements each."""

    units: int
    unit: int
    tp: int
    tp_rank: int
    start: int
    end: int

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        sharding: Sharding | None = None,
        tp: int = 1,
        tp_rank: int = 0,
        start: int = 0,
        end: int | None = None,
    ) -> Span:
        """The span that a `Piece` or a `Want` names; ValueError where its fields contradict one another."""
        elements = math.prod(shape)
        if sharding is None or tp == 1:
            units, unit, tp, tp_rank = 1, elements, 1, 0
        elif not shape or shape[0] != sharding.units * sharding.rows or not 0 <= tp_rank < tp:
            raise ValueError(f"shape {shape} is not dealt out by {sharding} to rank {tp_rank} of {tp}")
        else:
            units, unit = sharding.units, sharding.rows * math.prod(shape[1:])
        span = cls(units, unit, tp, tp_rank, start, 0)
        end = span.local if end is None else end
        if not 0 <= start <= end <= span.local:
            raise ValueError(f"elements {start}:{end} of a part that has {span.local}")
        return replace(span, end=end)

    @property
    def local(self) -> int:
        """Elements of the whole local part."""
        return local_count(self.units, self.tp_rank, self.tp) * self.unit

    @property
    def numel(self) -> int:
        """Elements."""
        return self.end - self.start

    @property
    def whole(self) -> bool:
        """Whether this is all of the tensor."""
        return self.tp == 1 and self.numel == self.units * self.unit

    def cut(self, start: int, end: int) -> Span:
        """The elements start:end of this span."""
        return replace(self, start=self.start + start, end=self.start + end)

    def regroup(self, other: Span) -> Span:
        """This span, counted in `other`'s units, which a part in plain order can be."""
        return replace(self, units=other.units, unit=other.unit) if self.tp == 1 else self


@dataclass(frozen=True)
class Piece:
    """A rank's part of a named tensor."""

    tensor: Tensor
    """The elements, in any shape that has as many, on any device."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    sharding: Sharding | None = None
    """How the whole is dealt out over tensor-parallel ranks; None: it is not."""
    tp: int = 1
    tp_rank: int = 0
    start: int = 0
    """First element, in the flattened local part."""
    end: int | None = None
    """One past the last element; None: the local part's end."""
    copies: Copies = "none"
    """Who else holds it: those ranks share the writing. All of them must give it."""

    def __post_init__(self) -> None:
        if self.span.numel != self.tensor.numel():
            raise ValueError(f"{self.tensor.numel()} elements given for the {self.span.numel} of {self.span}")

    @property
    def span(self) -> Span:
        """Where its elements belong."""
        return Span.of(self.shape, self.sharding, self.tp, self.tp_rank, self.start, self.end)

    @property
    def bytes(self) -> int:
        """Size of the elements."""
        return self.tensor.numel() * self.tensor.element_size()

    def cut(self, start: int, end: int) -> Piece:
        """The elements start:end of this piece."""
        if (start, end) == (0, self.tensor.numel()):
            return self
        flat = self.tensor.reshape(-1)[start:end]
        return replace(self, tensor=flat, start=self.start + start, end=self.start + end)


@dataclass(frozen=True)
class Want:
    """The part of a named tensor that a reader needs."""

    sharding: Sharding | None = None
    tp: int = 1
    tp_rank: int = 0
    start: int = 0
    end: int | None = None
    into: Tensor | None = None
    """Where to put it, contiguous, of any device and floating dtype; None: in a new tensor on the CPU."""
    shape: tuple[int, ...] | None = None
    """What the whole tensor's shape must be; None: any."""

    def span(self, shape: tuple[int, ...]) -> Span:
        """What is wanted of a tensor of `shape`."""
        return Span.of(shape, self.sharding, self.tp, self.tp_rank, self.start, self.end)

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The local part's own shape where all of it is wanted; else one dimension."""
        return part_shape(shape, self.sharding, self.span(shape))


def part_shape(shape: tuple[int, ...], sharding: Sharding | None, span: Span) -> tuple[int, ...]:
    """The shape of `span`'s tensor: that of the local part if it is all of it, else flat."""
    if span.numel != span.local:
        return (span.numel,)
    if span.tp == 1:
        return shape
    assert sharding is not None
    return (sharding.local_rows(span.tp_rank, span.tp), *shape[1:])


def overlaps(source: Span, target: Span) -> bool:
    """Whether the two spans share an element."""
    return _Common(source, target).any


def copy_overlap(source_E: Tensor, source: Span, target_F: Tensor, target: Span) -> int:
    """Copy what `source` and `target` share from one flat contiguous tensor to the other; returns how many elements.

    Args:
        source_E: the elements of `source`, flat; any device and dtype.
        target_F: the elements of `target`, flat; written in place, converted to its dtype.

    Raises:
        ValueError: the spans are not of one tensor, dealt out in one way.
    """
    common = _Common(source, target)
    copied = 0
    for first, last in common.runs():
        a, b, count = common.in_source(first), common.in_target(first), last - first
        low, high = common.within(first)
        from_, to_ = a + low - source.start, b + low - target.start
        width = high - low
        if count == 1:
            target_F[to_ : to_ + width].copy_(source_E[from_ : from_ + width])
        else:
            _strided(target_F, to_, count, width, common.target_step).copy_(
                _strided(source_E, from_, count, width, common.source_step)
            )
        copied += count * width
    return copied


def _strided(flat: Tensor, offset: int, rows: int, width: int, step: int) -> Tensor:
    return torch.as_strided(flat, (rows, width), (step, 1), flat.storage_offset() + offset)


class _Common:
    """The units that two spans of one tensor share: an arithmetic progression, numbered 0, 1, 2, ..."""

    def __init__(self, source: Span, target: Span) -> None:
        source, target = source.regroup(target), target.regroup(source)
        if (source.units, source.unit) != (target.units, target.unit):
            raise ValueError(f"dealt out in {source.units} x {source.unit} and in {target.units} x {target.unit}")
        self._source, self._target, self.unit = source, target, source.unit
        period = math.lcm(source.tp, target.tp)
        shared = (u for u in range(source.tp_rank, period, source.tp) if u % target.tp == target.tp_rank)
        first = next(shared, source.units)
        self._first, self._period = first, period
        self._source_first, self._target_first = first // source.tp * self.unit, first // target.tp * self.unit
        self.source_step = period // source.tp * self.unit
        self.target_step = period // target.tp * self.unit
        count = max(0, -(-(source.units - first) // period)) if self.unit else 0
        low, high = 0, count  # the units of which both hold anything
        full_low, full_high = 0, count  # those of which both hold everything
        for span, origin, step in (
            (source, self._source_first, self.source_step),
            (target, self._target_first, self.target_step),
        ):
            if span.numel == 0:
                low, high = 0, 0
            if not step:
                continue
            low = max(low, (span.start - origin - self.unit) // step + 1)
            high = min(high, -(-(span.end - origin) // step))
            full_low = max(full_low, -(-(span.start - origin) // step))
            full_high = min(full_high, (span.end - origin - self.unit) // step + 1)
        self._low, self._high = low, high
        self._full_low = max(low, full_low)
        self._full_high = min(high, full_high)

    @property
    def any(self) -> bool:
        return any(self.within(j)[0] < self.within(j)[1] for j, _ in self.runs())

    def in_source(self, j: int) -> int:
        """Where common unit j begins in the source's local part."""
        return self._source_first + j * self.source_step

    def in_target(self, j: int) -> int:
        """Where common unit j begins in the target's local part."""
        return self._target_first + j * self.target_step

    def within(self, j: int) -> tuple[int, int]:
        """The elements of common unit j that both spans hold."""
        a, b = self.in_source(j), self.in_target(j)
        low = max(0, self._source.start - a, self._target.start - b)
        high = min(self.unit, self._source.end - a, self._target.end - b)
        return low, high

    def runs(self) -> list[tuple[int, int]]:
        """Ranges of common units, each either a single unit of which a part is shared, or units shared whole."""
        if self._full_low >= self._full_high:
            singles = range(self._low, self._high)
            return [(j, j + 1) for j in singles if self.within(j)[0] < self.within(j)[1]]
        edges = [*range(self._low, self._full_low), *range(self._full_high, self._high)]
        partial = [(j, j + 1) for j in edges if self.within(j)[0] < self.within(j)[1]]
        return sorted([*partial, (self._full_low, self._full_high)])


def deal(pieces: Mapping[str, Piece], mesh: Mesh) -> dict[str, Piece]:
    """The share of `pieces` that this rank writes: what several ranks hold is cut among them, equal in bytes.

    Every rank of a replica group must give the same names and sizes; nothing is exchanged.
    """
    places: dict[Copies, tuple[int, int]] = {
        "none": (0, 1),
        "data": (mesh.dp_rank, mesh.dp),
        "tensor": (mesh.tp_rank, mesh.tp),
        "all": (mesh.rank, mesh.world),
    }
    share: dict[str, Piece] = {}
    for copies, (index, count) in places.items():
        held = {name: pieces[name] for name in sorted(pieces) if pieces[name].copies == copies}
        total = sum(piece.bytes for piece in held.values())
        begin, end = total * index // count, total * (index + 1) // count
        offset = 0
        for name, piece in held.items():
            size, elements = piece.tensor.element_size(), piece.tensor.numel()
            # Rounded down alike by the two ranks at a cut.
            low = min(max(0, (begin - offset) // size), elements) if index else 0
            high = min(max(0, (end - offset) // size), elements) if index + 1 < count else elements
            offset += piece.bytes
            if low < high or (elements == 0 and index == 0):
                share[name] = piece.cut(low, high)
    return share
