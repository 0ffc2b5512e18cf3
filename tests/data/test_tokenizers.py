"""Every tokenizer gives text back, never lets a document end itself, and says what is wrong with its file."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.config import TokenizerConfig
from megatron_essh.config.components import TokenizerType
from megatron_essh.data import Tokenizer, build_tokenizer
from megatron_essh.data import tokenizers as tokenizers_module
from megatron_essh.data.tokenizers import padded_vocab_size
from megatron_essh.data.unigram_training import train_unigram
from megatron_essh.errors import UserError

TEXTS = [
    "",
    "the quick brown fox\n\n",
    "  leading and trailing  ",
    "Grüße, 漢字かな 😀\u200d🎉 \u0301 \ufeff",
    "\x00\x01\t\r\n\x7f\x1b[0m",
    "<|endoftext|></s><|end_of_text|><eos><|begin_of_text|>",
    "x = 12345678  # comment's\r\n\tdon't WE'LL",
]
PATTERNS = ("gpt2", "cl100k", "o200k", "llama3")


@pytest.fixture(scope="module")
def unigram_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model that our own command's library trained."""
    folder = tmp_path_factory.mktemp("unigram")
    (folder / "text.txt").write_text("\n".join([*TEXTS, "the theme, then the thesis\n" * 200]), encoding="utf-8")
    train_unigram([folder / "text.txt"], 400, folder / "tokenizer.model")
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def lossless(rank_file: Path, bpe_file: Path) -> list[Tokenizer]:
    """The tokenizers that give every text back."""
    configs = [TokenizerConfig(type="tiktoken", model=str(rank_file), pattern=p) for p in PATTERNS]
    configs += [TokenizerConfig(type="byte"), TokenizerConfig(type="huggingface", model=str(bpe_file))]
    return [build_tokenizer(config) for config in configs]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(TEXTS))
def test_any_text_comes_back(lossless: list[Tokenizer], text: str) -> None:
    for tokenizer in lossless:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eod for i in ids)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=30) | st.sampled_from(TEXTS) | st.just("a\ud800b"), max_size=6))
def test_a_batch_holds_the_ids_of_its_texts(
    lossless: list[Tokenizer], sentencepiece_file: Path, texts: list[str]
) -> None:
    sentencepiece = build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(sentencepiece_file)))
    for tokenizer in [*lossless, sentencepiece]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizers_module, "_LONG_SPACE", 3)
            ids, lengths = tokenizer.encode_batch(texts)
        assert (ids.dtype, lengths.dtype) == (np.uint32, np.int64)
        parts = np.split(ids, np.cumsum(lengths))
        assert parts.pop().size == 0
        assert [part.tolist() for part in parts] == [tokenizer.encode(text) for text in texts]


@pytest.mark.slow
def test_every_character_of_every_plane_comes_back(lossless: list[Tokenizer], unigram_file: Path) -> None:
    """Assigned or not, control characters and non-characters included; U+2581 is sentencepiece's space."""
    unigram = build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(unigram_file)))
    characters = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    # All of them once, in an order that puts strangers side by side; and every one between two letters.
    mixed = "".join(chr(characters[i * 40_009 % len(characters)]) for i in range(len(characters)))
    assert len(set(mixed)) == len(characters) == 1_112_064
    texts = [mixed[begin : begin + 4096] for begin in range(0, len(mixed), 4096)]
    texts += ["".join(f"a{chr(c)}b" for c in range(begin, begin + 256)) for begin in range(0, 0x3000, 256)]
    for tokenizer in [*lossless, unigram]:
        ids, lengths = tokenizer.encode_batch(texts)
        parts = np.split(ids, np.cumsum(lengths))[:-1]
        for text, part in zip(texts, parts, strict=True):
            expected = text.replace("\u2581", " ") if tokenizer is unigram else text
            assert tokenizer.decode(part.tolist()) == expected
        assert tokenizer.eod not in ids


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_any_bytes_come_back_from_byte_level_tokenizers(lossless: list[Tokenizer], content: bytes) -> None:
    for tokenizer in lossless:
        ids = tokenizer.encode_bytes(content)
        assert tokenizer.decode_bytes(ids) == content
        assert tokenizer.decode(ids) == content.decode(errors="replace")
        try:
            assert ids == tokenizer.encode(content.decode())
        except UnicodeDecodeError:
            assert tokenizer.decode(ids).encode() != content


def test_every_single_byte_comes_back(lossless: list[Tokenizer]) -> None:
    for tokenizer in lossless:
        for byte in range(256):
            (token,) = tokenizer.encode_bytes(bytes([byte]))
            assert tokenizer.decode_bytes([token]) == bytes([byte])


def test_tokenizers_that_are_not_byte_level_say_so(
    sentencepiece_file: Path, bpe_file: Path, tmp_path: Path, lossless: list[Tokenizer]
) -> None:
    prefixed = json.loads(bpe_file.read_text(encoding="utf-8"))["pre_tokenizer"] | {"add_prefix_space": True}
    normalised = edited(bpe_file, tmp_path, normalizer={"type": "NFC"})
    for kind, path in (
        ("sentencepiece", str(sentencepiece_file)),
        ("huggingface", normalised),
        ("huggingface", edited(bpe_file, tmp_path, "prefixed.json", pre_tokenizer=prefixed)),
    ):
        tokenizer = build_tokenizer(TokenizerConfig(type=kind, model=path))
        with pytest.raises(UserError, match="not byte-level has tokens for text alone; decode the bytes first"):
            tokenizer.encode_bytes(b"a")
        assert tokenizer.decode_bytes(tokenizer.encode("some text")).strip() == b"some text"
    for tokenizer in lossless:
        with pytest.raises(UserError, match="token id -1 stands for no token"):
            tokenizer.decode_bytes([-1])


def test_special_tokens_are_text_unless_asked_for(lossless: list[Tokenizer], sentencepiece_file: Path) -> None:
    sentencepiece = build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(sentencepiece_file)))
    for tokenizer in [*lossless, sentencepiece]:
        for name, token in tokenizer.special_tokens.items():
            text = f"a{name}b"
            assert token not in tokenizer.encode(text)
            asked = tokenizer.encode(text, special_tokens=True)
            assert asked == [*tokenizer.encode("a"), token, *tokenizer.encode("b")]
            assert tokenizer.encode(name * 2, special_tokens=True) == [token, token]
        assert tokenizer.encode("no such", special_tokens=True) == tokenizer.encode("no such")
    counts = [len(tokenizer.special_tokens) for tokenizer in [*lossless, sentencepiece]]
    assert counts == [1, 5, 2, 256, 0, 1, 2]


def test_special_tokens_are_those_of_the_libraries(rank_file: Path, bpe_file: Path) -> None:
    """What stands around a special token splits as the library itself splits it."""
    import tokenizers

    config = TokenizerConfig(type="tiktoken", model=str(rank_file), pattern="cl100k")
    ours = build_tokenizer(config)
    for text in ("the <|endoftext|>  the", "<|fim_prefix|>x <|fim_suffix|>\n\n<|fim_middle|>", " <|endoftext|> "):
        theirs = ours._encoding.encode(text, allowed_special="all")  # type: ignore[attr-defined]
        assert ours.encode(text, special_tokens=True) == theirs
    library = tokenizers.Tokenizer.from_file(str(bpe_file))
    text = "The quick <|endoftext|> brown fox<|endoftext|>"
    bpe = build_tokenizer(TokenizerConfig(type="huggingface", model=str(bpe_file)))
    assert bpe.encode(text, special_tokens=True) == library.encode(text).ids


def test_a_document_cannot_end_itself_by_an_added_token_that_is_not_special(bpe_file: Path, tmp_path: Path) -> None:
    content = json.loads(bpe_file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = False
    path = edited(bpe_file, tmp_path, added_tokens=content["added_tokens"])
    with pytest.raises(UserError, match=r"edited\.json: the text '<\|endoftext\|>' gives the end-of-document token"):
        build_tokenizer(TokenizerConfig(type="huggingface", model=path))


needs_dna = pytest.mark.skipif(
    "dna" not in get_args(TokenizerType), reason="the configuration does not know the type dna"
)


@needs_dna
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ACGTNRYSWKMBDHVacgtnryswkmbdhvUu \n\r\t"), max_size=60))
def test_nucleotides_come_back_in_upper_case_without_white_space(text: str) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(type="dna"))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "".join(text.split()).upper().replace("U", "T")
    assert all(0 <= i < 15 for i in ids)
    batch, lengths = tokenizer.encode_batch([text, "acgt"])
    assert (batch.tolist(), lengths.tolist()) == ([*ids, 0, 1, 2, 3], [len(ids), 4])


@needs_dna
def test_nucleotides_fit_the_dna_models_vocabulary_and_nothing_else_is_one() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(type="dna"))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.decode([0, 15, 1])) == (16, 15, "AC")
    for text, where in ((">chr1\nACGT", 0), ("AC-GT", 2), ("ACGTé", 4), ("AC漢", 2), ("MET?", 1)):
        with pytest.raises(UserError, match=re.escape(f"{text[where]!r} at character {where} of ")):
            tokenizer.encode(text)
    with pytest.raises(UserError, match="that is not byte-level"):
        tokenizer.encode_bytes(b"AC")


def test_a_vocabulary_is_padded_to_the_next_multiple() -> None:
    assert [padded_vocab_size(n) for n in (1, 127, 128, 129, 50_257, 128_256)] == [128, 128, 128, 256, 50_304, 128_256]
    assert padded_vocab_size(257, 8) == 264


def test_sentencepiece_gives_plain_text_back(sentencepiece_file: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(sentencepiece_file)))
    for text in ("The quick brown fox", "naïve façade", "漢字 😀", "</s> is only text"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
    assert (tokenizer.eod, tokenizer.decode([tokenizer.eod])) == (2, "")


def test_what_no_text_can_hold_becomes_a_replacement_character(
    lossless: list[Tokenizer], sentencepiece_file: Path
) -> None:
    sentencepiece = build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(sentencepiece_file)))
    for tokenizer in [*lossless, sentencepiece]:
        # sentencepiece's own normalisation turns U+FFFD into a space.
        shown = "a b" if tokenizer is sentencepiece else "a\ufffdb"
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == shown
        assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")  # a pair of surrogates is a character


def test_bytes_that_are_not_text_decode_visibly(lossless: list[Tokenizer]) -> None:
    for tokenizer in lossless:
        ids = tokenizer.encode("é")
        assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_the_byte_tokenizer_is_the_bytes_and_an_end() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(type="byte"))
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([97, 256, 98]) == "ab"


@pytest.mark.parametrize(
    ("pattern", "vocab_size", "eod"), [("gpt2", 1, 0), ("cl100k", 21, 1), ("o200k", 21, 1), ("llama3", 256, 1)]
)
def test_a_rank_file_gets_its_familys_special_tokens(rank_file: Path, pattern: str, vocab_size: int, eod: int) -> None:
    ranks = len(rank_file.read_bytes().splitlines())
    tokenizer = build_tokenizer(TokenizerConfig(type="tiktoken", model=str(rank_file), pattern=pattern))
    assert (tokenizer.vocab_size, tokenizer.eod) == (ranks + vocab_size, ranks + eod)
    end = {"llama3": "<|end_of_text|>"}.get(pattern, "<|endoftext|>")
    assert tokenizer.decode([tokenizer.eod]) == end
    assert tokenizer.encode(" the 123") == [260, 32, 265]


def test_llama3_tokens_stand_where_llama3_has_them(rank_file: Path) -> None:
    ranks = len(rank_file.read_bytes().splitlines())
    tokenizer = build_tokenizer(TokenizerConfig(type="tiktoken", model=str(rank_file), pattern="llama3"))
    for offset, name in ((0, "begin_of_text"), (6, "start_header_id"), (7, "end_header_id"), (9, "eot_id")):
        assert tokenizer.decode([ranks + offset]) == f"<|{name}|>"
    assert tokenizer.decode([ranks + 255]) == "<|reserved_special_token_247|>"


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters() | st.sampled_from(" \n\r\t'sSlLdDaé1²_漢"), max_size=40))
@pytest.mark.parametrize("name", ["r50k", "cl100k", "o200k"])
def test_patterns_split_as_tiktokens_own(name: str, text: str) -> None:
    import regex
    from tiktoken_ext import openai_public

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
        theirs = getattr(openai_public, f"{name}_base")()
    ours = tokenizers_module._PATTERNS[{"r50k": "gpt2"}.get(name, name)]
    assert regex.findall(ours, text) == regex.findall(theirs["pat_str"], text)
    ranks = {"r50k": 50_256, "cl100k": 100_256, "o200k": 199_998}[name]
    specials = tokenizers_module._SPECIALS[{"r50k": "gpt2"}.get(name, name)]
    assert {token: ranks + offset for token, offset in specials.items()} == theirs["special_tokens"]


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A tokenizer of each pattern whose merges show where white space is split."""
    merges = ["  ", "   ", "    ", " \n", "\n ", "\n\n", "\r\n", "\t ", " \t", " a", "  a", " !", "!\n", "!\n\n", "/\n"]
    merges += ["\u3000", " \u3000", "\u3000 ", "\x1c ", " \x1c", " 1", "\n1", "\na", "\n!", "\ta", "\x0ba", "\x85 "]
    tokens = [bytes([i]) for i in range(256)] + [b"\xe3\x80", b"\xc2\x85"] + [m.encode() for m in merges]
    path = tmp_path_factory.mktemp("spaced") / "spaced.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return {p: build_tokenizer(TokenizerConfig(type="tiktoken", model=str(path), pattern=p)) for p in PATTERNS}


@settings(max_examples=400, deadline=None)
@given(text=st.text(st.sampled_from("   \n\r\t\x0b\x1c\x85\u3000aS1!/'é"), max_size=30))
def test_white_space_that_is_split_apart_from_the_rest_gives_the_same_ids(
    spaced: dict[str, Tokenizer], text: str
) -> None:
    whole = {pattern: tokenizer.encode(text) for pattern, tokenizer in spaced.items()}
    for least in (2, 3, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizers_module, "_LONG_SPACE", least)
            for pattern, tokenizer in spaced.items():
                assert tokenizer.encode(text) == whole[pattern], (pattern, least)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_megabytes_of_spaces_are_a_text_like_any_other(spaced: dict[str, Tokenizer], pattern: str) -> None:
    tokenizer, spaces = spaced[pattern], " " * 1_000_100
    long, after, four = tokenizer.encode("a" + spaces + "a"), tokenizer.encode(" a"), tokenizer.encode("    ")
    assert len(four) == len(after) == 1
    assert long[:1] + long[-1:] == tokenizer.encode("a") + after
    assert len(long) < len(spaces)  # merged over its whole length
    assert tokenizer.decode(long) == "a" + spaces + "a"
    assert tokenizer.decode(tokenizer.encode("a\n" + spaces)) == "a\n" + spaces


@pytest.mark.skipif("ESSH_GPT2_RANKS" not in os.environ, reason="ESSH_GPT2_RANKS names no r50k_base.tiktoken")
def test_gpt2_has_its_published_ids() -> None:
    config = TokenizerConfig(type="tiktoken", model=os.environ["ESSH_GPT2_RANKS"], pattern="gpt2")
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50_257, 50_256)
    assert tokenizer.encode("Hello world, it's 2026!") == [15496, 995, 11, 340, 338, 1160, 2075, 0]


@pytest.mark.skipif("ESSH_LLAMA3_RANKS" not in os.environ, reason="ESSH_LLAMA3_RANKS names no Llama 3 rank file")
def test_llama3_has_its_published_ids() -> None:
    config = TokenizerConfig(type="tiktoken", model=os.environ["ESSH_LLAMA3_RANKS"], pattern="llama3")
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod) == (128_256, 128_001)
    prompt = "<|begin_of_text|>hello world!<|eot_id|>"
    assert tokenizer.encode(prompt, special_tokens=True) == [128_000, 15_339, 1917, 0, 128_009]
    assert max(tokenizer.encode(prompt)) < 128_000


def test_the_fingerprint_is_of_type_pattern_and_content(rank_file: Path, bpe_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.tiktoken"
    copy.write_bytes(rank_file.read_bytes())
    prints = [
        build_tokenizer(TokenizerConfig(type="tiktoken", model=str(path), pattern=pattern)).fingerprint
        for path in (rank_file, copy)
        for pattern in PATTERNS
    ]
    assert prints[:4] == prints[4:]
    copy.write_bytes(b"".join(rank_file.read_bytes().splitlines(keepends=True)[:-1]))
    prints.append(build_tokenizer(TokenizerConfig(type="tiktoken", model=str(copy))).fingerprint)
    prints.append(build_tokenizer(TokenizerConfig(type="byte")).fingerprint)
    prints.append(build_tokenizer(TokenizerConfig(type="huggingface", model=str(bpe_file))).fingerprint)
    assert len(set(prints)) == 4 + 3
    assert {len(p) for p in prints} == {64}


def edited(bpe_file: Path, folder: Path, name: str = "edited.json", **changes: object) -> str:
    content = json.loads(bpe_file.read_text(encoding="utf-8")) | changes
    path = folder / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def added(names: list[str]) -> list[dict[str, object]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": 400 + i, "content": name, "special": True, **flags} for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["<eos>", "<|end_of_text|>", "</s>"], "</s>"),
        (["<eos>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["<eos>"], "<eos>"),
    ],
)
def test_the_end_of_document_is_the_first_known_name(
    bpe_file: Path, tmp_path: Path, names: list[str], chosen: str
) -> None:
    model = json.loads(bpe_file.read_text(encoding="utf-8"))["model"]
    vocabulary = {("unused" if token == "<|endoftext|>" else token): i for token, i in model["vocab"].items()}
    path = edited(bpe_file, tmp_path, added_tokens=added(names), model=model | {"vocab": vocabulary})
    tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", model=path))
    assert tokenizer.decode([tokenizer.eod]) == chosen
    assert tokenizer.vocab_size >= tokenizer.eod + 1
    nameless = edited(bpe_file, tmp_path, added_tokens=[], model=model | {"vocab": vocabulary})
    with pytest.raises(UserError, match="no end-of-document token; add one of"):
        build_tokenizer(TokenizerConfig(type="huggingface", model=nameless))


def test_truncation_and_padding_of_a_tokenizer_json_do_not_reach_documents(bpe_file: Path, tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        **{"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"},
    }
    path = edited(bpe_file, tmp_path, truncation=truncation, padding=padding)
    tokenizer, plain = (build_tokenizer(TokenizerConfig(type="huggingface", model=p)) for p in (path, str(bpe_file)))
    for text in ("a", "The quick brown fox jumps"):
        assert tokenizer.encode(text) == plain.encode(text)


@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece", "huggingface"])
@pytest.mark.parametrize("content", [None, b"", b"\x00\xff not a tokenizer\n", b"{}", b"a b c\n"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, kind: str, content: bytes | None) -> None:
    path = tmp_path / "some.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"some\.model: "):
        build_tokenizer(TokenizerConfig(type=kind, model=str(path)))


def test_a_damaged_rank_file_is_refused(rank_file: Path, tmp_path: Path) -> None:
    lines = rank_file.read_bytes().splitlines(keepends=True)
    doubled = base64.b64encode(b"th") + b" 268\n"
    for damaged, message in (
        (lines[:200], "no rank for byte 200"),
        (lines[:50] + lines[51:], "ranks are not 0 to 266, each once"),
        ([*lines, lines[-1]], "ranks are not 0 to 268, each once"),
        ([*lines, doubled], "ranks are not 0 to 268, each once"),
        ([*lines[:-1], b"not/base64? 267\n"], "line 268"),
        ([*lines[:-1], lines[-1][:3]], "line 268"),
    ):
        path = tmp_path / "damaged.tiktoken"
        path.write_bytes(b"".join(damaged))
        with pytest.raises(UserError, match=message):
            build_tokenizer(TokenizerConfig(type="tiktoken", model=str(path)))


def test_a_sentencepiece_model_without_an_end_is_refused(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words to train on"] * 20),
        model_prefix=str(tmp_path / "endless"),
        vocab_size=20,
        hard_vocab_limit=False,
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(UserError, match="no end-of-sentence piece"):
        build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(tmp_path / "endless.model")))


def test_an_id_that_stands_for_nothing_is_refused(lossless: list[Tokenizer], sentencepiece_file: Path) -> None:
    sentencepiece = build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(sentencepiece_file)))
    for tokenizer in [*lossless, sentencepiece]:
        for token in (-1, tokenizer.vocab_size, 2**40):
            assert not tokenizer.has(token)
            with pytest.raises(UserError, match=f"token id {token} stands for no token"):
                tokenizer.decode([5, token])
        assert tokenizer.has(5)
        assert tokenizer.has(tokenizer.eod)


def test_building_and_using_a_tokenizer_opens_no_connection(
    rank_file: Path, bpe_file: Path, sentencepiece_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for kind, path in (("tiktoken", rank_file), ("huggingface", bpe_file), ("sentencepiece", sentencepiece_file)):
        tokenizer = build_tokenizer(TokenizerConfig(type=kind, model=str(path)))
        assert tokenizer.decode(tokenizer.encode("some text")) == "some text"
