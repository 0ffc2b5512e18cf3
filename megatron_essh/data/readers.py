"""What kinds of file text comes in, and files, compressed or not, as streams of bytes.

Knows nothing of documents. The libraries for Zstandard and Parquet are optional and imported where they are used.
"""

from __future__ import annotations

import importlib
import io
import zlib
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_essh.data.index_format import MAGIC
from megatron_essh.errors import UserError

_SUFFIXES = {
    (".jsonl", ".json"): "json lines",
    (".fasta", ".fa", ".fna", ".faa", ".ffn", ".frn"): "fasta",
    (".parquet",): "parquet",
}
_COMPRESSED = (".gz", ".zst")
_BUFFER = 1 << 20
_REMEDY = "unpack it to see, and copy or make it again"


class Format(Enum):
    """How documents lie in a file."""

    JSON_LINES = "json lines"
    """A JSON object a line."""
    FASTA = "fasta"
    """Records of a `>` line and lines of sequence, a document each."""
    PARQUET = "parquet"
    """A row is a document."""
    TEXT = "text"
    """The whole file is one document."""


def format_of(path: Path) -> Format:
    """The file's format by its name, with or without `.gz` or `.zst` at the end."""
    name = path.stem if path.suffix.lower() in _COMPRESSED else path.name
    suffix = Path(name).suffix.lower()
    return next((Format(kind) for suffixes, kind in _SUFFIXES.items() if suffix in suffixes), Format.TEXT)


def check_readable(files: Iterable[Path]) -> None:
    """Hold the files to formats that can be read here.

    Raises:
        UserError: a package that a file needs is missing, a Parquet file is compressed as a whole, or a file is the
            index of a token pair, which stands in a folder that should hold text.
    """
    for path in files:
        compressed = path.suffix.lower()
        if compressed == ".idx" and _begins_with(path, MAGIC):
            raise UserError(
                f"--input: {path}: the index of a token pair, and no text; keep pairs in another folder, or name the "
                "text by a glob"
            )
        if format_of(path) is Format.PARQUET:
            if compressed in _COMPRESSED:
                raise UserError(f"{path}: a Parquet file that is compressed as a whole; unpack it")
            load_package("pyarrow", path)
        elif compressed == ".zst":
            load_package("zstandard", path)


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def load_package(name: str, path: Path, module: str | None = None) -> Any:
    """The optional package that reading `path` needs (or a `module` of it); UserError naming it where it is missing."""
    try:
        return importlib.import_module(module or name)
    except ImportError:
        raise UserError(
            f"{path}: reading it needs the package {name}, which is not installed: pip install {name} "
            "(or this project with its extra: pip install 'megatron-essh[data]')"
        ) from None


class InputFile:
    """A file as a buffered stream of its uncompressed bytes.

    Attributes:
        stream: what to read from; damage raises UserError, a failing disk OSError.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        raw: io.RawIOBase = self._file
        if path.suffix.lower() == ".gz":
            raw = _Inflated(path, self._file, "gzip", lambda: _Gzip(zlib.decompressobj(wbits=31)), zlib.error, 1 << 16)
        elif path.suffix.lower() == ".zst":
            library = load_package("zstandard", path)
            # One call gives all that its input holds, and 4 bytes can hold 128 KiB: small steps bound it to 16 MiB.
            raw = _Inflated(
                path, self._file, "zstd", lambda: library.ZstdDecompressor().decompressobj(), library.ZstdError, 512
            )
        self.stream = io.BufferedReader(raw, _BUFFER)

    def __enter__(self) -> InputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stream.close()
        self._file.close()

    @property
    def position(self) -> int:
        """Bytes of the file itself that have been read, up to a buffer more than `stream` has given."""
        return self._file.tell()


class _Gzip:
    """zlib's decoder, held to a buffer of output a call."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def decompress(self, data: bytes) -> bytes:
        return self._decoder.decompress(data, _BUFFER)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


class _Inflated(io.RawIOBase):
    """The content of a compressed file of one or more frames; a truncated or damaged one is an error."""

    def __init__(
        self, path: Path, file: io.RawIOBase, kind: str, decoder: Callable[[], Any], error: type[Exception], step: int
    ) -> None:
        self._path = path
        self._file = file
        self._kind = kind
        self._new_decoder = decoder
        self._error = error
        self._step = step
        self._decoder: Any = None
        self._frames = 0
        self._input = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._inflate():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _inflate(self) -> bool:
        """Make more of the content ready; False at the end of the file."""
        ended = False
        if not self._input:
            self._input = self._file.read(self._step) or b""
            ended = not self._input
        if self._decoder is None:
            if self._kind == "gzip" and self._frames:
                self._input = self._input.lstrip(b"\0")  # archivers fill the last block up
            if ended and self._frames:
                return False
            if not self._input and not ended:
                return True
            self._decoder = self._new_decoder()
            self._frames += 1
        try:
            self._ready = memoryview(self._decoder.decompress(self._input))
        except self._error as error:
            raise UserError(
                f"{self._path}: damaged {self._kind} file, near byte {self._file.tell()} ({error}); {_REMEDY}"
            ) from None
        if self._decoder.eof:
            self._input = self._decoder.unused_data
            self._decoder = None
        elif ended and not self._ready:
            raise UserError(f"{self._path}: truncated {self._kind} file of {self._file.tell()} bytes; {_REMEDY}")
        else:
            self._input = self._decoder.unconsumed_tail
        return True
