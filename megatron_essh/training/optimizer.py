"""AdamW with the recipe's two groups (section 5), and its moments by parameter name.

NVIDIA's apex provides the fused update where it is installed; elsewhere PyTorch's own fused AdamW does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NO_DECAY = frozenset({"rho_raw", "theta", "kc", "ks", "beta", "write_bias", "read_bias", "clock_bias"})
"""Parameters that pretraining never decays, by the last part of their name; embeddings and norms are added below.
The zero-lag table decays."""

MOMENTS = ("exp_avg", "exp_avg_sq")


def decays_in_pretraining(name: str) -> bool:
    """Whether the parameter `name` belongs to pretraining's decayed group: groups go by name, not by shape."""
    parts = name.split(".")
    return parts[-1] not in NO_DECAY and parts[0] != "embedding" and not any(p.endswith("norm") for p in parts)


def decay_groups(model: nn.Module, stage: str) -> tuple[list[str], list[str]]:
    """Names of the parameters with and without weight decay in `stage` ("pretrain" or "refine").

    Refinement decays every tensor of two or more dimensions, embeddings and modal tables too.
    """
    decayed: list[str] = []
    free: list[str] = []
    for name, parameter in model.named_parameters():
        decays = decays_in_pretraining(name) if stage == "pretrain" else parameter.ndim >= 2
        (decayed if decays else free).append(name)
    return decayed, free


def build_optimizer(
    model: nn.Module, stage: str, *, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW over the model's parameters; the learning rate is set at each step."""
    parameters = dict(model.named_parameters())
    decayed, free = decay_groups(model, stage)
    groups = [
        {"params": [parameters[n] for n in decayed], "weight_decay": weight_decay},
        {"params": [parameters[n] for n in free], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if next(model.parameters()).is_cuda and _has_nvidia_apex():
        from apex.optimizers import FusedAdam

        return FusedAdam(groups, lr=0.0, betas=betas, eps=eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def _has_nvidia_apex() -> bool:
    """Whether NVIDIA's apex is installed: a package of the same name on PyPI is another thing."""
    try:
        return importlib.util.find_spec("apex.optimizers") is not None and importlib.util.find_spec("amp_C") is not None
    except ModuleNotFoundError:
        return False


def named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Both moments of every parameter as `exp_avg.NAME` and `exp_avg_sq.NAME`; zeros before the first update."""
    moments = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for moment in MOMENTS:
            moments[f"{moment}.{name}"] = state.get(moment, torch.zeros_like(parameter.detach()))
    return moments


def updates_done(optimizer: torch.optim.Optimizer) -> int:
    """Updates that the optimizer has made."""
    for state in optimizer.state.values():
        if "step" in state:
            return int(state["step"])
    return max((int(group.get("step", 0)) for group in optimizer.param_groups), default=0)


def make_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Make the moments of the optimizer's `parameters`, zero, that are not there before the first update."""
    parameters = list(parameters)
    for parameter in parameters:
        state = optimizer.state[parameter]
        for moment in MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, requires_grad=False)
    set_updates(optimizer, parameters, updates_done(optimizer))


def set_updates(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], updates: int) -> None:
    """Say how many updates the moments of the optimizer's `parameters`, which are all, are of."""
    if isinstance(optimizer, torch.optim.AdamW):
        for parameter in parameters:
            optimizer.state[parameter]["step"] = torch.tensor(float(updates), device=parameter.device)
    else:  # apex counts in the group
        for group in optimizer.param_groups:
            group["step"] = updates
