"""The small JSON beside a token pair: which tokenizer made it, and what it holds.

`P.json` belongs to `P.bin` and `P.idx`. A pair without one (Megatron's own) is a whole pair; what the sidecar
would have said must then be given or measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_essh.errors import UserError
from megatron_essh.files import write_atomically

_TYPES: dict[str, type] = {
    "tokenizer": dict,
    "fingerprint": str,
    "vocab_size": int,
    "padded_vocab_size": int,
    "eod": int,
    "documents": int,
    "tokens": int,
    "largest_id": int,
    "data_fingerprint": str,
}
_OF_PREPROCESSING: dict[str, type] = {
    "empty_documents": int,
    "skipped_documents": int,
    "inputs": list,
}
"""What only a pair straight from text has: one that was merged or cut has no such figures of its own."""


def sidecar_path(prefix: str | Path) -> Path:
    """`<prefix>.json`."""
    return Path(f"{prefix}.json")


def write_sidecar(prefix: str | Path, content: Mapping[str, Any]) -> None:
    """Write the sidecar of a pair that is there already, whole or not at all.

    Keys: `tokenizer` (a `TokenizerConfig` mapping, its path absolute), `fingerprint` and `vocab_size` (the
    tokenizer's), `padded_vocab_size`, `eod`, `documents`, `tokens`, `largest_id` (-1 where there is no
    token), `data_fingerprint` (`IndexedDataset.fingerprint` of the pair that the other figures describe).
    Straight from text also `empty_documents` (of those in the pair), `skipped_documents` (of the input, in no pair)
    and `inputs`, a mapping of `path`, `bytes` and `sha256` for each file.
    """
    write_atomically(sidecar_path(prefix), sidecar_bytes(content))


def sidecar_bytes(content: Mapping[str, Any]) -> bytes:
    """The file of a sidecar with the keys of `write_sidecar`."""
    extra = set(content) - set(_TYPES)
    known = f"a sidecar holds {sorted(_TYPES)} and perhaps {sorted(_OF_PREPROCESSING)}, got {sorted(content)}"
    assert set(_TYPES) <= set(content), known
    assert extra <= set(_OF_PREPROCESSING), known
    return json_bytes(content)


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """`content` as indented JSON. A file name that is not UTF-8 is written as the escapes that JSON reads back."""
    return (json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """The sidecar of `prefix`, or None where there is none.

    Raises:
        UserError: the file is there and is not a sidecar.
    """
    path = sidecar_path(prefix)
    remedy = "remove it, or make the pair again with tools/preprocess_data.py"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise UserError(f"{path}: not a JSON file ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}; {remedy}")
    for key, kind in {**_TYPES, **_OF_PREPROCESSING}.items():
        if key in _OF_PREPROCESSING and key not in content:
            continue
        value = content.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{path}: {key}: expected {kind.__name__}, got {value!r}; {remedy}")
    return content
