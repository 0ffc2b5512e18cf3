"""Runs of one preprocessing command, killed at random moments: what test_killed_runs.py starts.

    python kill_runs.py FOLDER TIMES SEED

Prints JSON: how many runs were killed, went on after finished parts, and came to an end; a fault is an AssertionError.
The moments are moments of the process's own work, so that they spread over all of it on a busy machine too. The signal
of that timer ends a process as kill -9 does: by the kernel, at once, with nothing said to it.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np

from megatron_essh.config import TokenizerConfig
from megatron_essh.data import documents, preprocessing
from megatron_essh.data.documents import find_files
from megatron_essh.data.preprocessing import Preprocessing, preprocess


def write_input(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir()
    for part in range(16):
        texts = [bytes(rng.integers(97, 123, rng.integers(1, 4000), np.uint8)).decode() for _ in range(100)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        if part % 2:
            (folder / f"part_{part}.jsonl.gz").write_bytes(gzip.compress(lines))
        else:
            (folder / f"part_{part}.jsonl").write_bytes(lines)


def go(root: Path, out: str, workers: int, seconds: float) -> tuple[int, float]:
    """A run in a process of its own that ends after so much work; its status (-27: killed) and the work it did."""
    (root / "log").write_text("")
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        task = Preprocessing(
            tokenizer=TokenizerConfig(type="byte"),
            output_prefix=str(root / out / "x"),
            append_eod=True,
            validation_every=9,
            workers=workers,
        )
        begin = time.process_time()
        with (root / "log").open("w") as log:
            preprocess(find_files([str(root / "in")]), task, lambda line: print(line, file=log, flush=True))
            print(time.process_time() - begin, file=log, flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, float((root / "log").read_text().split()[-1]) if status == 0 else 0.0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def main(root: Path, times: int, seed: int) -> dict[str, int]:
    preprocessing._SHARD_BYTES, documents._BATCH_BYTES = 1 << 18, 1 << 16
    rng = np.random.default_rng(seed)
    write_input(root / "in", rng)
    seconds = {}
    for workers in (2, 1):
        status, seconds[workers] = go(root, "whole", workers, 100)
        assert status == 0
    expected = contents(root / "whole")
    assert len(expected) == 6
    out = root / "out"
    counts = {"killed": 0, "went on": 0, "came to an end": 0}
    while counts["killed"] < times:
        workers = 2 if counts["killed"] % 4 == 3 else 1
        status, _ = go(root, "out", workers, float(rng.uniform(0.01, 0.9)) * seconds[workers])
        counts["went on"] += "going on after" in (root / "log").read_text()
        for split in ("document", "validation"):
            if (out / f"x_text_{split}.idx").exists():
                for name in (f"x_text_{split}{suffix}" for suffix in (".bin", ".idx", ".json")):
                    assert (out / name).read_bytes() == expected[name], f"{name} looks whole and is not"
        if status == -signal.SIGPROF:
            counts["killed"] += 1
            continue
        assert status == 0
        assert contents(out) == expected
        shutil.rmtree(out)
        counts["came to an end"] += 1
    assert go(root, "out", 2, 100)[0] == 0
    assert contents(out) == expected
    return counts


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
