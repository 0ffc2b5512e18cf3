"""The output folder of a run: what lies where in it, its lock, and what may continue the run it holds."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from megatron_essh.config import RunConfig, config_from_mapping, config_to_mapping
from megatron_essh.errors import UserError
from megatron_essh.files import write_atomically
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.checkpoint import checkpoint_steps, find_checkpoint, remove_unfinished

MAY_CHANGE = (
    "training.log_every",
    "training.validate_every",
    "training.validation_batches",
    "training.validation_tiers",
    "training.output",
    "training.device",
    "training.threads",
    "training.recompute",
    "training.skip_limit",
    "training.compare_every",
    "checkpoint.",
    "parallel.",
    "data.train",  # the data's fingerprint decides: a moved copy continues the run, other data is refused
    "data.blend",  # likewise, with data.blend_weights: the saved data position holds them
    "data.validation",
    "data.index_cache",
    "data.workers",
)
"""Settings that a resumed run may change, because its trained weights do not depend on them."""


class RunFolder:
    """`<output>`: checkpoints/, tensorboard/, metrics.jsonl, config.yaml. Locked while entered.

    The lock is the operating system's, so that a killed run leaves none behind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"training.output: {self.path} is a file or lies below one; give a folder") from None
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(
                f"training.output: another process is training in {self.path}; stop it or give another folder"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            print(
                f"warning: {self.path} cannot be locked here: never start two runs in it",
                file=sys.stderr,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def newest_checkpoint(self, mesh: Mesh | None = None, damaged: list[str] | None = None) -> Path | None:
        """The checkpoint to continue from, None in a new folder; clears what a killed save left.

        Args:
            mesh: the run's ranks, which look for it together.
            damaged: filled, on the first rank, with what is wrong with newer ones.

        Raises:
            UserError: there are checkpoints, but not one is whole.
        """
        if mesh is None or mesh.is_first:
            remove_unfinished(self.checkpoints)

        def tell(damage: str) -> None:
            print(f"warning: skipping a damaged checkpoint: {damage}", file=sys.stderr, flush=True)
            if damaged is not None:
                damaged.append(damage)

        found = find_checkpoint(self.checkpoints, mesh, on_damage=tell)
        if found is None and checkpoint_steps(self.checkpoints):
            raise UserError(
                f"{self.checkpoints}: every checkpoint is damaged; restore one or remove them to start over"
            )
        return found

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved config, which `load_config` reads back."""
        write_atomically(self.config, yaml.safe_dump(config_to_mapping(config), sort_keys=False).encode())


def refuse_another_run(checkpoint: Path, values: Mapping[str, Any], config: RunConfig, stage: str) -> None:
    """Raise unless `config` and `stage` would train on exactly as the run that wrote `checkpoint` would.

    Args:
        values: the checkpoint's values, with its `stage` and `config`.

    Raises:
        UserError: naming the first setting that differs, both values and the remedy.
    """
    elsewhere = "give a new run another output folder (--output)"
    if values.get("stage") != stage:
        raise UserError(f"{checkpoint}: holds a {values.get('stage')} run, not a {stage} run; {elsewhere}")
    saved = config_from_mapping(RunConfig, values["config"], f"{checkpoint}: config")
    free = (*MAY_CHANGE, "refinement.") if stage == "pretrain" else MAY_CHANGE
    for key, before, now in differences(config_to_mapping(saved), config_to_mapping(config)):
        if not key.startswith(free):
            raise UserError(
                f"{checkpoint}: this run was started with {key}: {_show(before)}, and the config now says "
                f"{_show(now)}; {elsewhere}, or set {key} back to {_show(before)}"
            )


def differences(left: Any, right: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value in left, value in right) of each setting in which two nested mappings differ."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in (*left, *(k for k in right if k not in left)):
            yield from differences(left.get(key), right.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif left != right:
        yield prefix, left, right


def _show(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
