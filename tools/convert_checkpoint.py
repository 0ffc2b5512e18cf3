"""Convert checkpoints to and from one safetensors file, and from DeepSpeed's own folders.

python tools/convert_checkpoint.py to-file out/run model.safetensors
    parameters under their plain names, of a run, a checkpoint of any layout, or a DeepSpeed folder
python tools/convert_checkpoint.py to-file out/run all.safetensors --everything
    moments, statistics, random state and the run's position too
python tools/convert_checkpoint.py from-file all.safetensors out/copy/checkpoints
    back to a checkpoint that a run continues from
python tools/convert_checkpoint.py from-file model.safetensors out/other/checkpoints --config config.yaml
python tools/convert_checkpoint.py from-deepspeed ds_folder out/other/checkpoints --config config.yaml
    to a checkpoint that can be evaluated, exported and refined. It continues no pretraining run: neither form knows
    where in the data the run was

DeepSpeed's folders are read for ZeRO stages 1 to 3 with Adam (stage 0: parameters alone), data-parallel or, of this
program's model, tensor-parallel too; never by running code that is in them. Pipeline stages, experts, universal
folders and frozen parameters are refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_essh.config import RunConfig, load_config
from megatron_essh.errors import run_command
from megatron_essh.training.checkpoint import resolve_checkpoint
from megatron_essh.training.checkpoint.conversion import (
    checkpoint_to_file,
    deepspeed_to_checkpoint,
    deepspeed_to_file,
    file_to_checkpoint,
)
from megatron_essh.training.checkpoint.deepspeed_folder import is_deepspeed_folder, read_deepspeed_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_file = commands.add_parser("to-file", help="write one safetensors file")
    to_file.add_argument("source", metavar="RUN", type=Path, help="a run, a checkpoint or a DeepSpeed folder")
    to_file.add_argument("file", metavar="FILE", type=Path)
    to_file.add_argument("--everything", action="store_true", help="all tensors, and the run's position")
    from_file = commands.add_parser("from-file", help="make a checkpoint of one safetensors file")
    from_file.add_argument("file", metavar="FILE", type=Path)
    from_file.add_argument("--step", type=int, default=0, help="steps behind the parameters (default: 0)")
    from_deepspeed = commands.add_parser("from-deepspeed", help="make a checkpoint of a DeepSpeed folder")
    from_deepspeed.add_argument("source", metavar="FOLDER", type=Path)
    for command in (to_file, from_deepspeed):
        command.add_argument("--tag", help="of the DeepSpeed checkpoint (default: the newest)")
    for command in (from_file, from_deepspeed):
        command.add_argument("folder", metavar="OUT", type=Path, help="the folder of checkpoints to add it to")
        command.add_argument("--stage", choices=("pretrain", "refine"), default="pretrain")
    for command in (to_file, from_file, from_deepspeed):
        command.add_argument("--config", type=Path, help="the run's config, where the source does not hold it")
    args = parser.parse_args()

    config: RunConfig | None = None if args.config is None else load_config(args.config)
    if args.command == "to-file":
        if is_deepspeed_folder(args.source):
            if args.everything:
                parser.error("--everything: DeepSpeed's folders give parameters; make a checkpoint with from-deepspeed")
            state = read_deepspeed_folder(args.source, args.tag, None if config is None else config.model)
            size = deepspeed_to_file(state, args.file)
        else:
            size = checkpoint_to_file(resolve_checkpoint(args.source), args.file, everything=args.everything)
        print(f"wrote {args.file}, {size / 1e6:,.2f} MB")
        return
    if args.command == "from-file":
        made = file_to_checkpoint(args.file, args.folder, config, stage=args.stage, step=args.step)
    else:
        if config is None:
            parser.error("--config is needed: a DeepSpeed folder does not say of which model it is")
        state = read_deepspeed_folder(args.source, args.tag, config.model)
        made = deepspeed_to_checkpoint(state, args.folder, config, stage=args.stage)
    print(f"wrote {made}")


if __name__ == "__main__":
    run_command(main)
