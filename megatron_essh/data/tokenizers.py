"""Text to token ids and back: bytes, tiktoken rank files, sentencepiece models, Hugging Face tokenizer.json.

Every tokenizer is built from a file on disk and never asks a network. Text is only text: the spelling of a
special token inside a document gives ordinary tokens, so that no document can end itself. The libraries are
imported where they are used, so that a process pays for one of them at most.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

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
_HUGGINGFACE_EOD = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class Tokenizer(ABC):
    """What every type offers.

    Attributes:
        config: what it was built from.
        vocab_size: one more than the largest id.
        eod: id of the end-of-document token.
        fingerprint: SHA-256 of type, pattern and the file's content, 64 hex digits.
    """

    vocab_size: int
    eod: int

    def __init__(self, config: TokenizerConfig, content: bytes) -> None:
        self.config = config
        pattern = config.pattern if config.type == "tiktoken" else ""
        self.fingerprint = hashlib.sha256(f"{config.type}\n{pattern}\n".encode() + content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special token among them; a lone surrogate becomes U+FFFD."""
        return self._encode(valid_text(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 show as U+FFFD.

        Raises:
            UserError: an id that stands for no token.
        """
        for token in ids:
            if not self.has(token):
                raise UserError(
                    f"token id {token} stands for no token of the {self.config.type} tokenizer "
                    f"{self.config.model or ''}(vocabulary {self.vocab_size})"
                )
        return self._decode(list(ids))

    @abstractmethod
    def has(self, token: int) -> bool:
        """Whether the id stands for a token; not every one below `vocab_size` need do so."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


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
    types: dict[str, type[ByteTokenizer | TiktokenTokenizer | SentencePieceTokenizer | HuggingFaceTokenizer]] = {
        "byte": ByteTokenizer,
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

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i != self.eod).decode(errors="replace")

    def has(self, token: int) -> bool:
        return 0 <= token < 257


class TiktokenTokenizer(Tokenizer):
    """A rank file: lines of a token in base64, a space and its rank."""

    def __init__(self, config: TokenizerConfig) -> None:
        import tiktoken

        content = _read(config)
        super().__init__(config, content)
        ranks = _parse_ranks(content, config)
        specials = {name: len(ranks) + offset for name, offset in _SPECIALS[config.pattern].items()}
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

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)

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

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

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

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def has(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self._tokenizer.id_to_token(token) is not None


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
