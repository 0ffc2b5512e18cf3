"""tools/generate.py with several texts, stop strings and eight-bit weights."""

from __future__ import annotations

import pytest

TOOL = "tools/generate.py"
FEW = ("--max-new-tokens", 12, "--device", "cpu")


@pytest.fixture
def run(write_run, byte_pair):
    return write_run()


def texts_of(done, count):
    assert done.returncode == 0, done.stderr
    lines = done.stdout
    for number in range(1, count + 1):
        before, mark, lines = lines.partition(f"--- {number} of {count}\n")
        assert mark, done.stdout
        if number > 1:
            yield before
        else:
            assert before == ""
    yield lines


def test_texts_of_several_prompts_are_those_made_one_by_one(run, command):
    words = ("--prompt", "ab", "--prompt", "Zwölf ", "--num-samples", 2, "--seed", 5)
    for slots in ((), ("--slots", 3)):
        texts = list(texts_of(command(TOOL, run.folder, *words, *FEW, *slots), 4))
        for number, prompt in enumerate(("ab", "ab", "Zwölf ", "Zwölf ")):
            alone = command(TOOL, run.folder, "--prompt", prompt, "--seed", 5 + number, *FEW)
            assert texts[number] == alone.stdout
            assert texts[number].startswith(prompt)
        assert len(set(texts)) == 4


def test_a_text_ends_before_a_stop_string(run, command):
    words = (run.folder, "--prompt", "ab", "--seed", 1, *FEW)
    whole = command(TOOL, *words).stdout.removesuffix("\n")
    stop = whole[6:8]
    place = whole.index(stop, 2)
    done = command(TOOL, *words, "--stop", stop)
    assert done.stdout == whole[:place] + "\n"
    assert "up to --stop" in done.stderr


def test_stop_strings_do_not_end_a_text_within_its_prompt(run, command):
    done = command(TOOL, run.folder, "--prompt", "stop here", "--stop", "here", *FEW)
    assert done.stdout.startswith("stop here")
    assert len(done.stdout) > len("stop here\n")


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "fp8"])
def test_every_kind_of_weights_makes_text(run, command, weights):
    done = command(TOOL, run.folder, "--prompt", "ab", "--weights", weights, *FEW)
    assert done.returncode == 0, done.stderr
    assert "12 tokens" in done.stderr


def test_a_repetition_penalty_and_min_p_are_heeded(run, command):
    greedy = (run.folder, "--prompt", "ab", "--temperature", 0, "--max-new-tokens", 40, "--device", "cpu")
    plain, penalised = (command(TOOL, *greedy, "--repetition-penalty", p).stdout for p in (1.0, 1e9))
    assert plain != penalised
    sampled = (run.folder, "--prompt", "ab", "--temperature", 3, "--max-new-tokens", 40, "--device", "cpu")
    most_probable = command(TOOL, *sampled, "--min-p", 1.0).stdout
    assert most_probable == plain
    assert command(TOOL, *sampled).stdout != plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-samples", 0], "--num-samples: 0"),
        (["--slots", 0], "--slots: 0"),
        (["--stop", ""], "stop: an empty string"),
        (["--min-p", 2], "min_p: 2.0"),
        (["--repetition-penalty", 0], "repetition_penalty: 0.0"),
    ],
)
def test_bad_settings_are_one_line(run, command, words, message):
    done = command(TOOL, run.folder, "--prompt", "a", *words)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
