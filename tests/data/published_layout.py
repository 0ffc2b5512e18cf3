"""Megatron's pair from its published layout alone: a reader and a writer that share nothing with the package.

Slow and plain on purpose: the tests' second opinion.
"""

from __future__ import annotations

import struct
from itertools import pairwise

FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}
Documents = list[list[list[int]]]
"""Documents of sequences of tokens."""


class NotAPair(Exception):
    """What the bytes are no pair for."""


def write_published(documents: Documents, code: int) -> tuple[bytes, bytes]:
    """`.idx` and `.bin` of `documents`, of token type `code`."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = [token for sequence in sequences for token in sequence]
    width = struct.calcsize("<" + FORMATS[code])
    lengths, offsets, boundaries = [len(s) for s in sequences], [], [0]
    position = 0
    for length in lengths:
        offsets.append(position)
        position += length * width
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(offsets)}q", *offsets) + struct.pack(f"<{len(boundaries)}q", *boundaries)
    return index, struct.pack(f"<{len(tokens)}{FORMATS[code]}", *tokens)


def read_published(idx: bytes, bin_: bytes) -> Documents:
    """The documents of a pair, or `NotAPair`."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\x00\x00":
        raise NotAPair("header")
    version, code, sequences, entries = struct.unpack("<QBQQ", idx[9:34])
    if version != 1 or code not in FORMATS or entries < 1 or len(idx) != 34 + 12 * sequences + 8 * entries:
        raise NotAPair("header or size")
    lengths = struct.unpack_from(f"<{sequences}i", idx, 34)
    offsets = struct.unpack_from(f"<{sequences}q", idx, 34 + 4 * sequences)
    boundaries = struct.unpack_from(f"<{entries}q", idx, 34 + 12 * sequences)
    width = struct.calcsize("<" + FORMATS[code])
    position = 0
    for length, offset in zip(lengths, offsets, strict=True):
        if length < 0 or offset != position:
            raise NotAPair("lengths or offsets")
        position += length * width
    if position != len(bin_):
        raise NotAPair("size of the .bin")
    if boundaries[0] != 0 or boundaries[-1] != sequences or list(boundaries) != sorted(boundaries):
        raise NotAPair("boundaries")
    read = [
        list(struct.unpack_from(f"<{length}{FORMATS[code]}", bin_, offset))
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    return [read[first:last] for first, last in pairwise(boundaries)]
