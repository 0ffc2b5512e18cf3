"""Refine a pretrained model for all of its tiers at once, or continue a refinement.

python launch/refine.py configs/runs/quickstart.yaml --from out/run --set data.train=PREFIX --output out/fine

Without --output the refinement goes to the config's training.output with `-refined` after it.
"""

from __future__ import annotations

from pathlib import Path

from megatron_essh.errors import run_command
from megatron_essh.training.command import run_config, run_parser
from megatron_essh.training.loop import train


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument(
        "--from", dest="source", type=Path, required=True, metavar="RUN", help="pretraining run or checkpoint"
    )
    arguments = parser.parse_args()
    output = arguments.output
    if output is None:
        output = run_config(arguments).training.output.rstrip("/") + "-refined"
    train(run_config(arguments, output), "refine", initial=arguments.source)


if __name__ == "__main__":
    run_command(main)
