"""Cutting a tier out of a model's tensors (section 6): the first rows of some tensors, all of the others.

Works on names, shapes and a `ModelConfig` alone: no module is built. The weights are stored so that a prefix
of channels or units is always a tensor's first rows: all there is to know is how many of them stay.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_essh.config import ModelConfig
from megatron_essh.elastic.capacity import Capacity, full_capacity
from megatron_essh.errors import UserError

_CHANNEL_TABLES = "in_proj|write_bias|read_bias|clock_bias|rho_raw|theta|kc|ks|zero_lag|beta"
_CHANNEL_ROWS = re.compile(rf"blocks\.\d+\.mixer\.({_CHANNEL_TABLES})")
_VALUE_ROWS = re.compile(r"blocks\.\d+\.mixer\.out_proj")
_UNIT_ROWS = re.compile(r"blocks\.\d+\.feed_forward\.(gate_up|down)")
_WHOLE = re.compile(
    r"embedding\.weight|final_norm\.weight|blocks\.\d+\.((mixer|ff)_norm\.weight|attention\.(qkv|out_proj))"
)


def kept_rows(name: str, model: ModelConfig, capacity: Capacity) -> int | None:
    """How many first rows of the parameter `name` the capacity keeps; None where it keeps the whole tensor.

    Raises:
        UserError: the language model has no parameter of this name.
    """
    if _CHANNEL_ROWS.fullmatch(name):
        return capacity.channels
    if _VALUE_ROWS.fullmatch(name):
        return capacity.channels * model.value_width
    if _UNIT_ROWS.fullmatch(name):
        return capacity.ff_width
    if _WHOLE.fullmatch(name):
        return None
    raise UserError(f"tensor {name}: not a parameter of this kind of model, so there is no rule to cut it by")


def slice_config(model: ModelConfig, capacity: Capacity) -> ModelConfig:
    """The standalone model that `capacity` cuts out of `model`; it remembers its family's full sizes.

    Raises:
        UserError: the capacity is more than `model` holds.
    """
    _check_fits(model, capacity)
    return dataclasses.replace(
        model,
        channels=capacity.channels,
        ff_width=capacity.ff_width,
        family_channels=model.family_channels or model.channels,
        family_ff_width=model.family_ff_width or model.ff_width,
    )


def slice_tensors(tensors: Mapping[str, Tensor], model: ModelConfig, capacity: Capacity) -> dict[str, Tensor]:
    """The tensors of the standalone model that `capacity` cuts out of `model`.

    Args:
        tensors: every parameter of `model` under its plain name.
        model: what `tensors` holds.
        capacity: the prefix to keep.

    Returns:
        Contiguous copies on the CPU, each in a storage of its own, in the order and dtypes of `tensors`.

    Raises:
        UserError: the capacity is more than `model` holds, or a tensor's name or row count is wrong.
    """
    _check_fits(model, capacity)
    result = {}
    for name, tensor in tensors.items():
        rows, full_rows = kept_rows(name, model, capacity), kept_rows(name, model, full_capacity(model))
        if full_rows is not None and tensor.shape[0] != full_rows:
            raise UserError(f"tensor {name}: {tensor.shape[0]} rows, but the model's config makes it {full_rows}")
        kept = tensor.detach() if rows is None else tensor.detach()[:rows]
        result[name] = torch.empty(kept.shape, dtype=kept.dtype, device="cpu").copy_(kept)
    return result


def tier_parameters(tensors: Mapping[str, Tensor], model: ModelConfig, capacity: Capacity) -> int:
    """Parameters of the standalone model that `capacity` cuts out of `tensors`; meta tensors will do."""
    total = 0
    for name, tensor in tensors.items():
        rows = kept_rows(name, model, capacity)
        total += tensor.numel() if rows is None else rows * tensor[0].numel()
    return total


def _check_fits(model: ModelConfig, capacity: Capacity) -> None:
    if not capacity.fits(model):
        raise UserError(f"capacity {capacity}: more than the source holds, {full_capacity(model)} (channels, units)")
