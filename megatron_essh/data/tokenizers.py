"""Text to token ids and back: bytes, nucleotides, tiktoken rank files, sentencepiece models, tokenizer.json.

Every tokenizer is built from a file on disk and never asks a network. Text is only text: the spelling of a
special token inside a document gives ordinary tokens, so that no document can end itself. The libraries are
imported where they are used, so that a process pays for one of them at most.

What comes back: from bytes, rank files and byte-level tokenizer.json files any text, and any bytes (`encode_bytes`);
from a sentencepiece model what its own normalisation leaves; from another tokenizer.json what its normaliser and
decoder leave; from nucleotides the letters in upper case.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_essh.config import TokenizerConfig
from megatron_essh.errors import UserError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K_WORD = r"[^\r\n\p{L}\p{N}]?"

_PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": _O200K_WORD
    + r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + rf"{_CONTRACTIONS}?|{_O200K_WORD}"
    + r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + rf"{_CONTRACTIONS}?"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How each family splits text before it looks ranks up."""

_LONG_SPACE = 500_000  # half of the steps that the library has

_LLAMA3_NAMES = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *(
        "<|finetune_right_pad_id|>",
        "<|reserved_special_token_2|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)

_SPECIALS: dict[str, dict[str, int]] = {
    "gpt2": {"<|endoftext|>": 0},
    "cl100k": {
        "<|endoftext|>": 1,
        "<|fim_prefix|>": 2,
        "<|fim_middle|>": 3,
        "<|fim_suffix|>": 4,
        "<|endofprompt|>": 20,
    },
    "o200k": {"<|endoftext|>": 1, "<|endofprompt|>": 20},
    "llama3": {name: i for i, name in enumerate(_LLAMA3_NAMES)},
}
"""Special tokens of each family, their ids counted from the end of the ranks."""

_TIKTOKEN_EOD = {
    "gpt2": "<|endoftext|>",
    "cl100k": "<|endoftext|>",
    "o200k": "<|endoftext|>",
    "llama3": "<|end_of_text|>",
}
VOCABULARY_MULTIPLE = 128
"""Matrix products run fastest where a model's vocabulary is a multiple of this; padding makes up for the rest."""

_NUCLEOTIDES = b"ACGTNRYSWKMBDHV"
"""Ids 0 to 14: the four, any, and the ambiguity codes of IUPAC."""

_HUGGINGFACE_EOD = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


def padded_vocab_size(entries: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """The least multiple of `multiple` that holds a tokenizer of `entries`: what model.vocab_size should be."""
    return -(-entries // multiple) * multiple


class Tokenizer(ABC):
    """What every type offers.

    Attributes:
        config: what it was built from.
        vocab_size: one more than the largest id.
        eod: id of the end-of-document token.
        fingerprint: SHA-256 of type, pattern and the file's content, 64 hex digits.
        special_tokens: ids of the special tokens by their spelling.
    """

    vocab_size: int
    eod: int
    special_tokens: Mapping[str, int] = {}
    _byte_ids: Sequence[int] | None = None
    """The token of each single byte; None where the type is not byte-level."""

    def __init__(self, config: TokenizerConfig, content: bytes) -> None:
        self.config = config
        pattern = config.pattern if config.type == "tiktoken" else ""
        self.fingerprint = hashlib.sha256(f"{config.type}\n{pattern}\n".encode() + content).hexdigest()

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Ids of `text`; a lone surrogate becomes U+FFFD.

        The spelling of a special token is text like any other, so that none is among the ids. With `special_tokens` it
        is that token instead, and what stands before and after it is encoded as texts of their own: for a prompt that
        its author wrote, never for data.

        Raises:
            UserError: text that the tokenizer does not know (nucleotides).
        """
        text = valid_text(text)
        if not special_tokens or not self.special_tokens:
            return self._encode(text)
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [
            token
            for i, part in enumerate(parts)
            if part
            for token in ([self.special_tokens[part]] if i % 2 else self._encode(part))
        ]

    def encode_bytes(self, content: bytes) -> list[int]:
        """Ids of any bytes, from which `decode_bytes` gives them back; those of `encode` where they are UTF-8.

        Raises:
            UserError: this tokenizer is not byte-level.
        """
        if self._byte_ids is None:
            raise UserError(
                f"{self.config.model or self.config.type}: a {self.config.type} tokenizer that is not byte-level has "
                "tokens for text alone; decode the bytes first"
            )
        ids: list[int] = []
        for part in re.split("([\udc80-\udcff]+)", content.decode("utf-8", "surrogateescape")):
            if part and "\udc80" <= part[0] <= "\udcff":  # bytes that are no part of a character
                ids += [self._byte_ids[byte] for byte in part.encode("utf-8", "surrogateescape")]
            elif part:
                ids += self._encode(part)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of `ids`, complete characters or not; of a tokenizer that is not byte-level, its text as UTF-8.

        Raises:
            UserError: as for `decode`.
        """
        self._check(ids)
        return self._decode_bytes(list(ids))

    def encode_batch(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Ids of many texts, those of `encode`, without a Python object for each id where the library allows it.

        Runs on one thread, but for huggingface: its library uses every core unless TOKENIZERS_PARALLELISM is
        "false", which a process that is one of many should set.

        Returns:
            The ids of all texts one after the other, uint32 [sum of lengths]; and the number of ids in each text,
            int64 [texts].
        """
        arrays = self._encode_batch([valid_text(text) for text in texts])
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        # A first array fixes the type where there is no other.
        return np.concatenate([np.empty(0, np.uint32), *arrays], dtype=np.uint32, casting="unsafe"), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 show as U+FFFD.

        Raises:
            UserError: an id that stands for no token.
        """
        self._check(ids)
        return self._decode(list(ids))

    def _check(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not self.has(token):
                raise UserError(
                    f"token id {token} stands for no token of the {self.config.type} tokenizer "
                    f"{self.config.model or ''}(vocabulary {self.vocab_size})"
                )

    @abstractmethod
    def has(self, token: int) -> bool:
        """Whether the id stands for a token; not every one below `vocab_size` need do so."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def _decode_bytes(self, ids: list[int]) -> bytes:
        return self._decode(ids).encode()


def valid_text(text: str) -> str:
    """`text` as UTF-8 can hold it: a pair of surrogates becomes its character, a lone one U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `config` names.

    Raises:
        UserError: its file is missing or not of its type, or it has no end-of-document token.
    """
    types: dict[str, type[_AnyTokenizer]] = {
        "byte": ByteTokenizer,
        "dna": DnaTokenizer,
        "tiktoken": TiktokenTokenizer,
        "sentencepiece": SentencePieceTokenizer,
        "huggingface": HuggingFaceTokenizer,
    }
    return types[config.type](config)


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 for the end of a document, which has no text."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__(config, b"")
        self.vocab_size = 257
        self.eod = 256
        self._byte_ids = range(256)

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return self._decode_bytes(ids).decode(errors="replace")

    def _decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(i for i in ids if i != self.eod)

    def has(self, token: int) -> bool:
        return 0 <= token < 257


class DnaTokenizer(Tokenizer):
    """Nucleotides: A C G T, N for any, the other ambiguity codes of IUPAC, and 15 for the end, which has no text.

    Lower case (a masked repeat) is read as upper case, U (in RNA) as T, and white space is skipped, because files break
    sequences into lines. Every other character is an error: it would be a gap, a header or no nucleotide at all.
    """

    _UNKNOWN, _SKIPPED = 254, 255

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__(config, _NUCLEOTIDES)
        self.vocab_size = len(_NUCLEOTIDES) + 1
        self.eod = len(_NUCLEOTIDES)
        self._table = np.full(256, self._UNKNOWN, np.uint8)
        for letters, ids in ((_NUCLEOTIDES, range(self.eod)), (b"U", [_NUCLEOTIDES.index(b"T")])):
            for letter, token in zip(letters, ids, strict=True):
                self._table[letter] = self._table[letter | 0x20] = token
        self._table[list(b" \t\n\v\f\r")] = self._SKIPPED

    def _encode(self, text: str) -> list[int]:
        return self._ids(text).tolist()

    def _encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> npt.NDArray[np.uint8]:
        ids = self._table[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]  # "?" is unknown too
        unknown = np.flatnonzero(ids == self._UNKNOWN)
        if unknown.size:
            where = int(unknown[0])
            raise UserError(
                f"dna tokenizer: {text[where]!r} at character {where} of {text[:40]!r}, expected nucleotides "
                f"({_NUCLEOTIDES.decode()}, U, lower case too): leave out headers, gaps and proteins"
            )
        return ids[ids != self._SKIPPED]

    def _decode(self, ids: list[int]) -> str:
        return bytes(_NUCLEOTIDES[i] for i in ids if i != self.eod).decode()

    def has(self, token: int) -> bool:
        return 0 <= token <= self.eod


class TiktokenTokenizer(Tokenizer):
    """A rank file: lines of a token in base64, a space and its rank."""

    def __init__(self, config: TokenizerConfig) -> None:
        import tiktoken

        content = _read(config)
        super().__init__(config, content)
        ranks = _parse_ranks(content, config)
        self.special_tokens = specials = {n: len(ranks) + offset for n, offset in _SPECIALS[config.pattern].items()}
        self._byte_ids = [ranks[bytes([byte])] for byte in range(256)]
        self.vocab_size = max(specials.values()) + 1
        self.eod = specials[_TIKTOKEN_EOD[config.pattern]]
        self._ids = frozenset(ranks.values()) | frozenset(specials.values())
        self._encoding = tiktoken.Encoding(
            config.pattern, pat_str=_PATTERNS[config.pattern], mergeable_ranks=ranks, special_tokens=specials
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        done = 0
        for begin, end in _long_spaces(text, self.config.pattern):
            ids += self._encoding.encode_ordinary(text[done:begin])
            ids += self._encoding._encode_single_piece(text[begin:end])
            done = end
        return ids + self._encoding.encode_ordinary(text[done:])

    def _encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        return [
            np.array(self._encode(text), np.uint32)
            if any(_long_spaces(text, self.config.pattern))
            else self._encoding.encode_to_numpy(text, disallowed_special=())
            for text in texts
        ]

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)

    def _decode_bytes(self, ids: list[int]) -> bytes:
        return self._encoding.decode_bytes(ids)

    def has(self, token: int) -> bool:
        return token in self._ids


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece .model file; its own normalisation decides how much of a text comes back."""

    def __init__(self, config: TokenizerConfig) -> None:
        import sentencepiece

        content = _read(config)
        super().__init__(config, content)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            raise UserError(f"{config.model}: not a sentencepiece model; name its .model file") from None
        self.vocab_size = self._processor.get_piece_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            raise UserError(f"{config.model}: the model has no end-of-sentence piece; train it with an eos_id")
        pieces = range(self.vocab_size)
        self.special_tokens = {self._processor.id_to_piece(i): i for i in pieces if self._processor.is_control(i)}

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        return [np.array(ids, np.uint32) for ids in self._processor.encode(texts, num_threads=1)]

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def has(self, token: int) -> bool:
        return 0 <= token < self.vocab_size


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, without its truncation, padding and templates: a document is encoded as it is."""

    def __init__(self, config: TokenizerConfig) -> None:
        import tokenizers

        content = _read(config)
        super().__init__(config, content)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{config.model}: not a tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        names = [name for name in _HUGGINGFACE_EOD if name in ids]
        if not names:
            raise UserError(
                f"{config.model}: no end-of-document token; add one of {', '.join(_HUGGINGFACE_EOD)} "
                "to its added_tokens"
            )
        self.eod = ids[names[0]]
        if self.eod in self._encode(names[0]):
            raise UserError(
                f"{config.model}: the text {names[0]!r} gives the end-of-document token, so that a document which "
                'holds it would end there; give it "special": true in added_tokens'
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self._added = {i: token.content.encode() for i, token in added.items()}
        if _keeps_bytes(json.loads(content)) and all(character in ids for character in _BYTE_CHARACTERS):
            self._byte_ids = [ids[character] for character in _BYTE_CHARACTERS]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _decode_bytes(self, ids: list[int]) -> bytes:
        if self._byte_ids is None:
            return super()._decode_bytes(ids)
        texts = ((i, self._tokenizer.id_to_token(i) or "") for i in ids)
        return b"".join(
            self._added[i] if i in self._added else bytes(_BYTES_BY_CHARACTER[character] for character in text)
            for i, text in texts
        )

    def has(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self._tokenizer.id_to_token(token) is not None


_AnyTokenizer: TypeAlias = (
    ByteTokenizer | DnaTokenizer | TiktokenTokenizer | SentencePieceTokenizer | HuggingFaceTokenizer
)


def _keeps_bytes(content: dict[str, Any]) -> bool:
    """Whether the tokenizer.json cuts text into bytes and changes none of them."""
    parts = content.get("pre_tokenizer") or {}
    steps = parts.get("pretokenizers", [parts])
    return (
        content.get("normalizer") is None
        and (content.get("decoder") or {}).get("type") == "ByteLevel"
        and any(step.get("type") == "ByteLevel" for step in steps)
        and not any(step.get("add_prefix_space") for step in steps)
    )


def _byte_characters() -> str:
    """The character that stands for each byte in a byte-level vocabulary: itself, or for what cannot be seen one of
    those from U+0100 on, in order."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return "".join(chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256))


_BYTE_CHARACTERS = _byte_characters()
_BYTES_BY_CHARACTER = {character: byte for byte, character in enumerate(_BYTE_CHARACTERS)}


def _long_spaces(text: str, pattern: str) -> Iterator[tuple[int, int]]:
    """Pieces [begin, end) of white space that `pattern` splits off and that are too long for the library to do so.

    `\\s+(?!\\S)` takes a step back for every character of a run, and from a million steps on the library panics. What
    that alternative takes is known without it: a run (after its last line end, which all patterns but gpt2 take
    before it) but for its last character where text follows. No pattern looks behind, and none but that one and
    `\\s++$` ahead, so that the text before the piece, which ends in no run of its own or in a line end, and the text
    after it split as they do in the whole.
    """
    if len(text) < _LONG_SPACE:
        return
    line_ends = "" if pattern == "gpt2" else r"\r\n"
    space = rf"[^\S\x1c-\x1f{line_ends}]"  # Python alone counts 1c to 1f
    for run in re.finditer(rf"(?<!{space}){space}{{{_LONG_SPACE},}}", text):
        end = run.end()
        if end < len(text):
            if text[end] not in "\r\n":  # else `\s*[\r\n]` takes it, without a step back
                yield run.start(), end - 1
        elif r"\s++$" not in _PATTERNS[pattern]:  # which takes it, without a step back
            yield run.start(), end


def _read(config: TokenizerConfig) -> bytes:
    assert config.model is not None  # the config holds itself to that
    try:
        content = Path(config.model).read_bytes()
    except OSError as error:
        raise UserError(
            f"{config.model}: cannot be read: {error.strerror}; tokenizer.model names the {config.type} file"
        ) from None
    if not content:
        raise UserError(f"{config.model}: empty file; tokenizer.model names the {config.type} file")
    return content


def _parse_ranks(content: bytes, config: TokenizerConfig) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{config.model}: line {number}: {line[:40]!r}, expected a base64 token, a space and its "
                "rank: not a tiktoken rank file"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) != number:
        raise UserError(f"{config.model}: ranks are not 0 to {number - 1}, each once: the file is damaged or truncated")
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise UserError(f"{config.model}: no rank for byte {absent[0]}: the file is damaged or truncated")
    return ranks
