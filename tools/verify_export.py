"""Hold exports to the model they were cut from: hashes, names, counts, tensors and logits, bit for bit, on the CPU.

python tools/verify_export.py out/exports/T4
python tools/verify_export.py out/exports/T4 --source /elsewhere/run

Every folder is looked at, whatever the others are like. Ends with status 1 if an export differs or is damaged, with
status 2 if something was no export, or its source could not be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_essh.errors import UserError, run_command
from megatron_essh.export.verify import Check, RandomTokens, verify_export


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", metavar="EXPORT", type=Path, nargs="+", help="folder of an export")
    parser.add_argument("--source", type=Path, help="the source where it has moved (default: the recorded place)")
    parser.add_argument("--batches", type=int, default=4, help="random batches to compare logits on")
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest sequence compared")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens")
    args = parser.parse_args()

    tokens = RandomTokens(batches=args.batches, length=args.length, seed=args.seed)
    failed, unread = [], []
    for folder in args.exports:
        try:
            checks = verify_export(folder, args.source, tokens)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            unread.append(str(folder))
            continue
        print_checks(folder, checks)
        if not all(check.passed for check in checks):
            failed.append(str(folder))
    verified = len(args.exports) - len(failed) - len(unread)
    print(f"verified: {verified} export{'' if verified == 1 else 's'}")
    for what, folders in (("FAILED", failed), ("NOT VERIFIED", unread)):
        if folders:
            print(f"{what}: {', '.join(folders)}")
    return 2 if unread else 1 if failed else 0


def print_checks(folder: Path, checks: list[Check]) -> None:
    table = Table(title=str(folder), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("check")
    table.add_column("")
    table.add_column("detail", overflow="fold")
    for check in checks:
        table.add_row(check.name, "ok" if check.passed else "DIFFERS", check.detail)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    run_command(main)
