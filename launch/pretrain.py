"""Pretrain an elastic model, or continue where its newest checkpoint stands.

python launch/pretrain.py configs/runs/quickstart.yaml --set data.train=PREFIX --output out/run
"""

from __future__ import annotations

from megatron_essh.errors import run_command
from megatron_essh.training.command import run_config, run_parser
from megatron_essh.training.loop import train


def main() -> None:
    arguments = run_parser(__doc__).parse_args()
    train(run_config(arguments, arguments.output), "pretrain")


if __name__ == "__main__":
    run_command(main)
