"""The whole path on real text and a CPU: corpus, tokenizer, pretraining, refinement, exports, evaluation, samples.

Each stage is one of the project's own commands, shown as it runs, so that it can be typed again with other settings.
The default corpus is the source and documentation of Python's standard library (PSF licence), which every machine
that runs this has; --corpus takes files or a folder of your own. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_essh.errors import UserError, run_command
from megatron_essh.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("T1", "T4", "T7", "T10")
PROMPT = "def "
LEFT_OUT = {"encodings", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/quickstart"), help="where everything goes")
    parser.add_argument("--corpus", help="a folder, file or glob of your own text (.jsonl: its `text` fields)")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/runs/quickstart.yaml")
    parser.add_argument(
        "--short", action="store_true", help="a few steps of everything: shows that it works, learns little"
    )
    parser.add_argument("--fresh", action="store_true", help="delete --output first")
    args = parser.parse_args()

    out: Path = args.output
    if args.fresh and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    _claim(out, {"short": args.short, "corpus": args.corpus, "config": args.config.read_text(encoding="utf-8")})
    run = Stages()
    prefix, tokenizer = out / "data/corpus", out / "data/tokenizer.json"
    train, validation = (prefix.parent / f"corpus_text_{part}" for part in ("document", "validation"))

    if args.corpus:
        corpus = args.corpus
    else:
        corpus = str(out / "data/stdlib.jsonl")
        documents = _write_stdlib(Path(corpus))
        print(f"corpus: {documents} files of Python's standard library -> {corpus}\n", flush=True)
    run(
        "tokenizer",
        "tools/train_tokenizer.py",
        "--input",
        corpus,
        "--vocab-size",
        4096,
        "--output",
        tokenizer,
    )
    run(
        "preprocess", "tools/preprocess_data.py", "--input", corpus, "--output-prefix", prefix,
        "--tokenizer-type", "huggingface", "--tokenizer-model", tokenizer, "--append-eod",
        "--validation-every", 50, "--workers", 2,
    )  # fmt: skip
    sets = [f"data.train={train}", f"data.validation={validation}"]
    if args.short:
        sets += [
            "training.steps=24", "training.validate_every=12", "training.validation_batches=4",
            "elastic.ordering_interval=8", "checkpoint.save_every=12", "refinement.steps=4",
        ]  # fmt: skip
    overrides = [word for pair in sets for word in ("--set", pair)]
    run("pretrain", "launch/pretrain.py", args.config, "--output", out / "pretrain", *overrides)
    run(
        "refine",
        "launch/refine.py",
        args.config,
        "--from",
        out / "pretrain",
        "--output",
        out / "refine",
        *overrides,
    )
    exports = out / "exports"
    wanted = [word for tier in TIERS for word in ("--tier", tier)]
    run("export", "tools/export_tiers.py", out / "refine", *wanted, "--output", exports, "--overwrite")
    for tier in TIERS:
        run("verify", "tools/verify_export.py", exports / tier)
    for tier in TIERS:
        run(
            "evaluate", "tools/evaluate.py", "perplexity", exports / tier, "--data", validation,
            "--batches", 4 if args.short else 40, "--batch-size", 8, "--json", exports / tier / "perplexity.json",
        )  # fmt: skip
    for tier in TIERS:
        run(
            "sample", "tools/generate.py", exports / tier, "--prompt", PROMPT, "--max-new-tokens", 48,
            "--temperature", 0.8, "--top-p", 0.95, "--seed", 1,
        )  # fmt: skip
    results = [exports / tier / "perplexity.json" for tier in TIERS]
    run("plot", "tools/plot_frontier.py", *results, "--output", out / "frontier.png")
    return _summary(out, exports, run, short=args.short)


class Stages:
    """Runs the project's commands one after another, shows each, and keeps its seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, script: str, *words: object) -> None:
        command = [script, *map(str, words)]
        print(f"--- {stage}\n$ python {shlex.join(command)}", flush=True)
        begin = time.perf_counter()
        status = subprocess.run([sys.executable, str(ROOT / script), *map(str, words)], check=False).returncode
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin
        print(flush=True)
        if status:
            raise UserError(f"stage {stage} ended with status {status}; its own message stands above")


def _claim(out: Path, settings: dict[str, object]) -> None:
    """Refuse to mix a run with one of other settings in the same folder."""
    marker = out / "quickstart.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) != settings:
        raise UserError(
            f"{out}: holds a quickstart of other settings; add --fresh to delete it, or name another --output"
        )
    write_atomically(marker, json.dumps(settings, indent=1).encode())


def _stdlib_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(folder).parts):
            yield path


def _write_stdlib(target: Path) -> int:
    """The standard library as JSON lines, one document a file; returns the number of documents."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    lines = []
    for path in _stdlib_files(folder):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a handful of files test other encodings
        if text.strip():
            lines.append(json.dumps({"text": text, "source": str(path.relative_to(folder))}))
    if not lines:
        raise UserError(f"{folder}: no Python source here; give text of your own with --corpus")
    write_atomically(target, ("\n".join(lines) + "\n").encode())
    return len(lines)


def _summary(out: Path, exports: Path, run: Stages, *, short: bool) -> int:
    metrics = [json.loads(line) for line in (out / "pretrain/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [m["loss_by_capacity"]["full"] for m in metrics if "loss_by_capacity" in m]
    rows = [json.loads((exports / tier / "perplexity.json").read_text(encoding="utf-8")) for tier in TIERS]
    print("=== quickstart\n")
    print(f"training loss of the full model: {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end of pretraining")
    print(f"\n{'tier':>5} {'parameters':>12} {'loss':>8} {'perplexity':>11}")
    for tier, row in zip(TIERS, rows, strict=True):
        print(f"{tier:>5} {row['parameters']:>12,} {row['nll']:>8.4f} {row['perplexity']:>11.2f}")
    nll = [row["nll"] for row in rows]
    fell = losses[-1] < losses[0] - 0.5
    ordered = all(small > large for small, large in itertools.pairwise(nll)) and all(map(math.isfinite, nll))
    print("\nseconds: " + ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in run.seconds.items()))
    for what, where in (
        ("frontier", out / "frontier.png"),
        ("exports", exports),
        ("checkpoints", out / "refine/checkpoints"),
        ("TensorBoard", f"{out} (tensorboard --logdir {out})"),
        ("data", out / "data"),
    ):
        print(f"{what + ':':<12} {where}")
    if short:
        print("\nThis was the short form: it shows that every part works, not what the model can learn.")
        return 0
    if not fell:
        print(f"\nerror: the training loss fell by only {losses[0] - losses[-1]:.3f}", file=sys.stderr)
    if not ordered:
        print("\nerror: the tiers are not in order of quality (see the table)", file=sys.stderr)
    return 0 if fell and ordered else 1


if __name__ == "__main__":
    run_command(main)
