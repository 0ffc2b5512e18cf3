"""This process's place among those that a launcher started: its device, its groups, and what becomes of a failure.

torchrun, the DeepSpeed launcher and a Slurm script all say it in the same variables: RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT. Without them, or with a WORLD_SIZE of 1, a run is one process and opens no connection.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_essh.config import ParallelConfig
from megatron_essh.device import pick_device
from megatron_essh.errors import UserError
from megatron_essh.parallel.meeting import meet
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.parallel.watch import RankWatch

HOW = "start it with torchrun --nproc-per-node N launch/pretrain.py ..., or see launch/*.sh"


@contextmanager
def open_mesh(config: ParallelConfig, device: Literal["auto", "cpu", "cuda"]) -> Iterator[Mesh]:
    """The run's mesh, while entered. An error that leaves it on one rank ends all of them.

    Args:
        device: training.device.

    Raises:
        UserError: the environment does not describe a run, there are fewer GPUs than processes, the
            processes do not meet, or parallel.tensor does not divide them.
    """
    world = _number("WORLD_SIZE", 1)
    if world < 1:
        raise UserError(f"WORLD_SIZE is {world}, and a run has at least one process; {HOW}")
    if not os.environ.get("WORLD_SIZE") and os.environ.get("RANK"):
        raise UserError(f"RANK is {os.environ['RANK']}, and WORLD_SIZE is not set; set both or neither, or {HOW}")
    rank = _number("RANK", 0 if world == 1 else None)
    if rank >= world:  # nobody would ever answer it
        raise UserError(f"RANK is {rank}, and WORLD_SIZE {world} has ranks 0 to {world - 1}; {HOW}")
    if world == 1:
        if config.tensor > 1:
            raise UserError(f"parallel.tensor is {config.tensor}, and this is one process; {HOW}, or set it to 1")
        yield Mesh.single(pick_device(device, "training.device:"))
        return
    local = _number("LOCAL_RANK", None)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(f"WORLD_SIZE is {world}, and {name} is not set; {HOW}")
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", None)
    if not 1 <= port < 1 << 16:
        raise UserError(f"MASTER_PORT is {port}, and ports are 1 to {(1 << 16) - 1}; {HOW}")
    place = _own_device(device, local)
    timeout = timedelta(seconds=config.timeout_seconds)
    store = meet(rank, world, address, port, config.timeout_seconds)
    watch = RankWatch(dist.PrefixStore("watch", store), rank, world, address, timeout)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=place if place.type == "cuda" else None,
        )
        yield Mesh.build(config.tensor, place)
    except UserError as error:
        watch.fail(f"error: {error}", 2)
        raise
    except BaseException:
        watch.fail(traceback.format_exc(), 1)
        raise
    dist.barrier()  # nobody leaves while another still speaks to it
    watch.close()
    dist.destroy_process_group()


def from_first(mesh: Mesh, value: Any) -> Any:
    """The first rank's `value`, which can be pickled, on every rank. All call it."""
    if mesh.world_group is None:
        return value
    values = [value]
    # Through the host: what is pickled has no business on a GPU.
    dist.broadcast_object_list(values, src=0, group=mesh.world_group, device=torch.device("cpu"))
    return values[0]


def _number(name: str, default: int | None) -> int:
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        given = f"is {text!r}, no whole number" if text else "is not set"
        size = "" if name == "WORLD_SIZE" else f" (WORLD_SIZE is {os.environ.get('WORLD_SIZE')})"
        raise UserError(f"{name} {given}{size}; {HOW}")
    return int(text)


def _own_device(device: Literal["auto", "cpu", "cuda"], local: int) -> torch.device:
    if pick_device(device, "training.device:").type == "cpu":
        return torch.device("cpu")
    present = torch.cuda.device_count()
    if local >= present:
        raise UserError(
            f"LOCAL_RANK is {local}, and this machine has {present} CUDA devices; start at most {present} processes on "
            "it, or set training.device: cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
