"""The whole path on real text and a CPU: corpus, tokenizer, pretraining, refinement, exports, evaluation, samples.

Each stage is one of the project's own commands, shown as it runs, so that it can be typed again with other settings.
The default corpus is the source and documentation of Python's standard library (PSF licence), which every machine
that runs this has; --corpus takes text of your own. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_essh.config import load_config
from megatron_essh.data.documents import batches, find_files, read_batch
from megatron_essh.errors import UserError, run_command
from megatron_essh.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("T1", "T4", "T7", "T10")
VOCABULARY = 4096
LONGEST_DOCUMENT = 20_000
LEFT_OUT = {"encodings", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
SHORT_FORM = (
    "training.steps=24",
    "training.validate_every=12",
    "training.validation_batches=4",
    "elastic.ordering_interval=8",
    "checkpoint.save_every=12",
    "refinement.steps=4",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/quickstart"), help="where everything goes")
    parser.add_argument("--corpus", help="a folder, file or glob of your own text (.jsonl: its `text` fields)")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/runs/quickstart.yaml")
    parser.add_argument("--short", action="store_true", help="a few steps of everything: it works, it learns little")
    parser.add_argument("--fresh", action="store_true", help="delete --output first")
    args = parser.parse_args()

    load_config(args.config)  # a mistake in it is said before anything is deleted
    out: Path = args.output
    settings = {"short": args.short, "corpus": args.corpus, "config": args.config.read_text(encoding="utf-8")}
    claim(out, settings, fresh=args.fresh)
    corpus, tokenizer, prefix = out / "data/corpus.jsonl", out / "data/tokenizer.json", out / "data/corpus"
    documents = write_corpus(args.corpus, corpus)
    print(f"corpus: {args.corpus or 'the standard library'}, {documents:,} documents -> {corpus}\n", flush=True)

    run = Stages()
    run("tokenizer", "tools/train_tokenizer.py", input=corpus, vocab_size=VOCABULARY, output=tokenizer)
    run(
        "preprocess",
        "tools/preprocess_data.py",
        input=corpus,
        output_prefix=prefix,
        tokenizer_type="huggingface",
        tokenizer_model=tokenizer,
        append_eod=True,
        validation_every=min(50, max(2, documents // 10)),
        workers=2,
    )
    train, validation = (f"{prefix}_text_{part}" for part in ("document", "validation"))
    overrides = [f"data.train={train}", f"data.validation={validation}", *(SHORT_FORM if args.short else ())]
    pretrained, refined, exports = out / "pretrain", out / "refine", out / "exports"
    run("pretrain", "launch/pretrain.py", args.config, output=pretrained, set=overrides)
    run("refine", "launch/refine.py", args.config, **{"from": pretrained}, output=refined, set=overrides)
    run("export", "tools/export_tiers.py", refined, tier=TIERS, output=exports, overwrite=True)
    run("verify", "tools/verify_export.py", *(exports / tier for tier in TIERS))
    figures = [exports / tier / "perplexity.json" for tier in TIERS]
    for tier, figure in zip(TIERS, figures, strict=True):
        extent = {"batches": 4 if args.short else 40, "batch_size": 8}
        run("evaluate", "tools/evaluate.py", "perplexity", exports / tier, data=validation, **extent, json=figure)
    start = {"unconditional": True} if args.corpus else {"prompt": "def __init__(self"}
    for tier in TIERS:
        draw = {"max_new_tokens": 48, "temperature": 0.8, "top_p": 0.95, "seed": 1}
        run("sample", "tools/generate.py", exports / tier, **start, **draw)
    run("plot", "tools/plot_frontier.py", *figures, output=out / "frontier.png")

    metrics = [json.loads(line) for line in (pretrained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [m["loss_by_capacity"]["full"] for m in metrics if m["kind"] == "step"]
    rows = [json.loads(figure.read_text(encoding="utf-8")) for figure in figures]
    learned = summarize(losses, rows)
    print("\nseconds: " + ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in run.seconds.items()))
    print(f"data        {out / 'data'}")
    print(f"checkpoints {refined / 'checkpoints'}")
    print(f"exports     {exports}")
    print(f"TensorBoard tensorboard --logdir {out}")
    print(f"frontier    {out / 'frontier.png'}", flush=True)
    if args.short:
        print("\nThis was the short form: it shows that every part works, not what the model can learn.")
        return 0
    for fault in learned:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if learned else 0


class Stages:
    """Runs the project's commands one after another, shows each, and keeps its seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        # GNU OpenMP's threads spin at barriers for milliseconds; where another program wants a core, a step then takes
        # twenty times as long. A short spin costs nothing measurable on a quiet machine.
        self.environment = {"GOMP_SPINCOUNT": "3000", **os.environ}

    def __call__(self, stage: str, script: str, *words: object, **flags: Any) -> None:
        """Run `script` with `words` and `--flags`: True is a bare flag, a list is the flag once for each."""
        command = [script, *map(str, words)]
        for name, value in flags.items():
            flag = "--" + name.replace("_", "-")
            for one in value if isinstance(value, (list, tuple)) else [value]:
                command += [flag] if one is True else [flag, str(one)]
        print(f"--- {stage}\n$ python {shlex.join(command)}", flush=True)
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, str(ROOT / command[0]), *command[1:]], env=self.environment)
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the stage got the same Ctrl-C: training finishes its step and saves
            process.wait()
            raise
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin
        print(flush=True)
        if status:
            raise UserError(f"stage {stage} ended with status {status}; its own message stands above")


def claim(out: Path, settings: dict[str, object], *, fresh: bool) -> None:
    """Take the folder `out` for a run of these settings; `fresh` deletes an earlier quickstart in it, and only that."""
    marker, content = out / "quickstart.json", json.dumps(settings, indent=1)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not marker.is_file())):
        raise UserError(f"{out}: holds something that is no quickstart; name another --output")
    if marker.is_file():
        if fresh:
            shutil.rmtree(out)
        elif marker.read_text(encoding="utf-8", errors="replace") != content:
            raise UserError(
                f"{out}: holds a quickstart of other settings; delete it (make quickstart FRESH=1, or --fresh) or name "
                "another --output"
            )
    write_atomically(marker, content.encode())


def write_corpus(corpus: str | None, target: Path) -> int:
    """The corpus as JSON lines, one document each; returns their number.

    Long files are cut at line ends, which makes documents enough of one file to hold some out for validation.
    """
    documents = []
    for batch in batches(stdlib_files() if corpus is None else find_files([corpus])):
        for (sequences,) in read_batch(batch, ["text"], "replace"):
            documents += [piece for text in sequences for piece in cut_at_lines(text) if piece.strip()]
    if not documents:
        raise UserError(f"{corpus or 'standard library'}: no text there; name files of text with --corpus")
    write_atomically(target, "".join(json.dumps({"text": text}) + "\n" for text in documents).encode())
    return len(documents)


def stdlib_files() -> list[Path]:
    """The standard library's modules, but for tests, development tools and tables of character codes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(p for p in folder.rglob("*.py") if not LEFT_OUT & set(p.relative_to(folder).parts))


def cut_at_lines(text: str) -> Iterator[str]:
    """`text` in pieces of at most about LONGEST_DOCUMENT characters."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if size and size + len(line) > LONGEST_DOCUMENT:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    yield "".join(piece)


def summarize(losses: list[float], rows: list[dict[str, Any]]) -> list[str]:
    """Print the run's figures; returns what should have come out and did not."""
    print("=== quickstart\n")
    print(
        f"training loss of the full model: {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end of pretraining\n"
    )
    print(f"{'tier':>5} {'parameters':>12} {'loss':>8} {'perplexity':>11}")
    for tier, row in zip(TIERS, rows, strict=True):
        print(f"{tier:>5} {row['parameters']:>12,} {row['nll']:>8.4f} {row['perplexity']:>11.2f}")
    faults = []
    if not losses[-1] < losses[0] - 0.5:
        faults.append(f"the training loss fell by only {losses[0] - losses[-1]:.3f}")
    nll = [row["nll"] for row in rows]
    if not (all(map(math.isfinite, nll)) and all(small > large for small, large in itertools.pairwise(nll))):
        faults.append("the tiers are not in order of quality (see the table)")
    return faults


if __name__ == "__main__":
    run_command(main)
