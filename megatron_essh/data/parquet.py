"""Rows of a Parquet file, read a megabyte or so at a time, as bytes that travel between processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_essh.data.readers import load_package
from megatron_essh.errors import UserError

_MOST_ROWS = 1 << 16


def row_batches(path: Path, keys: Sequence[str], batch_bytes: int) -> Iterator[tuple[bytes, int, int]]:
    """The columns `keys` of a file, in order: rows for `rows`, the first one's number from 1, bytes of the file.

    Raises:
        UserError: not a Parquet file, damaged, or a column is missing or holds no text.
    """
    arrow = load_package("pyarrow", path)
    parquet = load_package("pyarrow", path, "pyarrow.parquet")
    try:
        with parquet.ParquetFile(path, buffer_size=batch_bytes, pre_buffer=False) as file:
            for key in keys:
                _check_column(arrow, file.schema_arrow, key, path)
            yield from _batches(arrow, file, path.stat().st_size, keys, batch_bytes)
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: cannot be read as Parquet ({reason}); copy or make it again") from None


def rows(content: bytes) -> Iterator[tuple[Any, ...]]:
    """Of each row the columns in the order they were asked for: bytes, a list of them, or None."""
    import pyarrow

    with pyarrow.ipc.open_stream(content) as stream:
        for batch in stream:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _check_column(arrow: Any, schema: Any, key: str, path: Path) -> None:
    if key not in schema.names:
        there = ", ".join(map(repr, schema.names[:20])) or "none"
        raise UserError(f"{path}: no column {key!r}; it has {there}; see --json-keys")
    kind = schema.field(key).type
    if _as_bytes(arrow, kind) is None:
        raise UserError(f"{path}: column {key!r} holds {kind}; expected text or lists of text")


def _batches(
    arrow: Any, file: Any, size: int, keys: Sequence[str], batch_bytes: int
) -> Iterator[tuple[bytes, int, int]]:
    done = told = 0
    total = max(file.metadata.num_rows, 1)
    in_memory = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
    count = max(1, min(_MOST_ROWS, batch_bytes * total // max(in_memory, 1)))
    for batch in file.iter_batches(batch_size=count, columns=list(keys), use_threads=False):
        columns = [batch.column(key) for key in keys]
        # As bytes, so that text that is not UTF-8 is found row by row.
        plain = [column.cast(_as_bytes(arrow, column.type)) for column in columns]
        table = arrow.record_batch(plain, names=[str(i) for i in range(len(keys))])
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_batch(table)
        reached = size * (done + batch.num_rows) // total
        yield sink.getvalue().to_pybytes(), done + 1, reached - told
        told = reached
        done += batch.num_rows


def _as_bytes(arrow: Any, kind: Any) -> Any:
    """The type that holds the bytes of a column of text; None for a column of something else."""
    types = arrow.types
    if types.is_dictionary(kind):
        return _as_bytes(arrow, kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind):
        inner = _as_bytes(arrow, kind.value_type)
        return None if inner is None or types.is_nested(inner) else arrow.large_list(inner)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    binary = types.is_binary(kind) or types.is_large_binary(kind)
    return arrow.large_binary() if text or binary else None
