"""Which documents an input holds, in which order, and what is said where it does not hold any."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.data import documents
from megatron_essh.data.documents import batches, find_files, natural_key, read_batch
from megatron_essh.errors import UserError


def texts_of(files: list[Path], key: str = "text", encoding_errors: str = "strict") -> list[list[str]]:
    return [document[0] for batch in batches(files) for document in read_batch(batch, (key,), encoding_errors)]


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(files: list[Path], folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in files]


@given(numbers=st.lists(st.integers(0, 10**30), unique=True))
def test_numbered_names_sort_by_their_numbers(numbers: list[int]) -> None:
    assert sorted((f"part_{n}.jsonl" for n in numbers), key=natural_key) == [f"part_{n}.jsonl" for n in sorted(numbers)]


@given(st.lists(st.text("ab019._-²", max_size=6)))
def test_any_names_can_be_sorted_in_one_way(some: list[str]) -> None:
    shuffled = random.Random(0).sample(some, len(some))
    order = sorted(some, key=natural_key)
    assert [natural_key(n) for n in sorted(shuffled, key=natural_key)] == [natural_key(n) for n in order]


def test_files_folders_and_globs_come_in_natural_order_whatever_the_order_given(tmp_path: Path) -> None:
    make(tmp_path, "p_10.txt", "p_2.txt", "p_1.txt", "sub/deep/x.py", "sub/b.txt", ".hidden/a.txt", "sub/.git/a")
    everything = ["p_1.txt", "p_2.txt", "p_10.txt", "sub/b.txt", "sub/deep/x.py"]
    assert names(find_files([str(tmp_path)]), tmp_path) == everything
    assert names(find_files([str(tmp_path / "**/*")]), tmp_path) == everything
    mixed = [str(tmp_path / "sub"), str(tmp_path / "p_10.txt"), str(tmp_path / "p_[12].txt")]
    assert names(find_files(mixed), tmp_path) == everything


def test_a_name_with_glob_characters_is_a_file_first(tmp_path: Path) -> None:
    make(tmp_path, "a[1].txt")
    assert names(find_files([str(tmp_path / "a[1].txt")]), tmp_path) == ["a[1].txt"]


def test_inputs_that_name_nothing_or_a_file_twice_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "a.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    for given_ in ("absent.txt", "*.jsonl", "empty"):
        with pytest.raises(UserError, match=r"--input .*: no file there"):
            find_files([str(tmp_path / "a.txt"), str(tmp_path / given_)])
    for twice in ([str(tmp_path), str(tmp_path / "a.txt")], [str(tmp_path / "*.txt")]):
        with pytest.raises(UserError, match="are the same file"):
            find_files(twice)


@settings(max_examples=50, deadline=None)
@given(
    contents=st.lists(st.text(max_size=30) | st.lists(st.text(max_size=9), max_size=3), max_size=12),
    batch_bytes=st.integers(1, 200),
    newline=st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]),
    last=st.booleans(),
    ascii_=st.booleans(),
)
def test_json_lines_give_every_document_whatever_the_batches(
    tmp_path_factory: pytest.TempPathFactory,
    contents: list[str | list[str]],
    batch_bytes: int,
    newline: str,
    last: bool,
    ascii_: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    lines = newline.join(json.dumps({"id": 1, "text": c}, ensure_ascii=ascii_) for c in contents)
    path.write_bytes((lines + newline * last).encode(errors="surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BATCH_BYTES", batch_bytes)
        assert texts_of([path]) == [c if isinstance(c, list) else [c] for c in contents]


def test_plain_text_is_a_document_a_file_and_json_lines_keep_their_place(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("first\nfile\n")
    (tmp_path / "2.jsonl").write_text('{"text": "second"}\n{"text": "third"}')
    (tmp_path / "3.py").write_bytes(b"\xef\xbb\xbffourth")
    (tmp_path / "4.json").write_bytes(b'\xef\xbb\xbf{"text": "fifth"}\n')
    (tmp_path / "5").write_text("")
    assert texts_of(find_files([str(tmp_path)])) == [
        ["first\nfile\n"],
        ["second"],
        ["third"],
        ["fourth"],
        ["fifth"],
        [""],
    ]


def test_several_keys_are_read_from_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "T", "body": ["x", "y"]}\n')
    (batch,) = batches([path])
    assert list(read_batch(batch, ("body", "title"))) == [[["x", "y"], ["T"]]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"line 301: not JSON"),
        (b"[" * 200_000, r"line 301: not JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", r"line 301: not JSON"),
        (b'"text"', r"line 301: expected a JSON object, found str"),
        (b'{"content": "x", "id": 3}', r"line 301: no key 'text'; it has 'content', 'id'; see --json-keys"),
        (b"{}", r"line 301: no key 'text'; it has none"),
        (b'{"text": 5}', r"line 301: text: expected text or a list of texts, got 5"),
        (b'{"text": null}', r"line 301: text: expected text"),
        (b'{"text": ["a", 1]}', r"line 301: text: expected text"),
        (b'{"text": "\xff"}', r"line 301: not UTF-8 text at byte 10 \(0xff\)"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, message: str
) -> None:
    monkeypatch.setattr(documents, "_BATCH_BYTES", 100)
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' * 150 + line + b'\n{"text": "good"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl: " + message):
        texts_of([path])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    make(tmp_path, "a.txt")
    (batch,) = batches([tmp_path / "a.txt"])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read: No such file"):
        list(read_batch(batch, ("text",)))


def test_text_that_is_not_utf8_is_refused_or_replaced_on_request(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("na\xefve".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8 text at byte 2 \(0xef\)"):
        texts_of([path])
    assert texts_of([path], encoding_errors="replace") == [["na\ufffdve"]]


def without_overriding(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code`, with `folder` as its argument, held to permission bits even as the superuser."""
    command = [sys.executable, "-c", code, str(folder)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("the superuser reads everything, and setpriv is not there to give that up")
        less = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--bounding-set={less}", f"--inh-caps={less}", *command]
    return subprocess.run(command, capture_output=True, text=True)


FIND = """
import sys
from pathlib import Path
from megatron_essh.data.documents import find_files
from megatron_essh.data.pair_files import find_pairs
from megatron_essh.errors import UserError
for find in (find_files, find_pairs):
    for given in ("in", "in/**/*", "in/**", "*/*/*", "in/sh*/*.idx"):
        try:
            print(find([sys.argv[1] + "/" + given]))
        except UserError as error:
            print(error)
"""


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    make(tmp_path, "in/a.idx", "in/a.bin", "in/shut/b.idx", "in/shut/b.bin")
    (tmp_path / "in/shut").chmod(0)
    try:
        done = without_overriding(tmp_path, FIND)
    finally:
        (tmp_path / "in/shut").chmod(0o755)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    for line in lines:
        assert re.match(rf"{tmp_path}/in/shut/?: cannot be listed: Permission denied; change its permissions", line)


def test_links_to_folders_are_followed_and_a_folder_reached_twice_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "in/a.txt", "elsewhere/b.txt")
    (tmp_path / "in/link").symlink_to(tmp_path / "elsewhere")
    assert names(find_files([str(tmp_path / "in")]), tmp_path) == ["in/a.txt", "in/link/b.txt"]
    (tmp_path / "elsewhere/round").symlink_to(tmp_path / "in")
    with pytest.raises(UserError, match="are the same folder; remove the link"):
        find_files([str(tmp_path / "in")])


@pytest.mark.parametrize("given_", ["in", "in/*"])
def test_what_is_no_file_in_a_folder_is_refused(tmp_path: Path, given_: str) -> None:
    make(tmp_path, "in/a.txt")
    (tmp_path / "in/part_2.txt").symlink_to(tmp_path / "unmounted/part_2.txt")
    with pytest.raises(UserError, match=r"--input: .*/in/part_2\.txt: a link to nothing; remove it"):
        find_files([str(tmp_path / given_)])
    (tmp_path / "in/part_2.txt").unlink()
    os.mkfifo(tmp_path / "in/pipe")
    with pytest.raises(UserError, match=r"--input: .*/in/pipe: neither a file nor a folder; remove it"):
        find_files([str(tmp_path / given_)])
