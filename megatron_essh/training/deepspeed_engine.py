"""The engine's face over DeepSpeed's ZeRO: the native engine's steps, with its results (architecture rule 5).

What is elastic, and what a step is, is the native engine's. Here stands only what differs when gradients, moments or
weights are dealt out over the replicas (zero_shares.py):

- Parameters are fp32, and DeepSpeed is told of no other precision: autocast and the products' low-precision copies are
  ours, so that modal tables, gate biases and norms stay fp32 in every pass.
- DeepSpeed sums gradients (`gradient_allreduce_op`), because losses are divided by the step's valid tokens already;
  stage 3 knows only the mean, and gets its losses times the replicas.
- Gradients are reduced when a backward pass is done, in the parameters' order. In the order in which backward passes
  bring them, which DeepSpeed's hooks take, capacities differ, and ranks would add up different parameters.
- Stages 0 and 1 run the native passes, with gradients kept in place (stage 0 records them too), and reduce once a step.
  Stages 2 and 3 reduce after every micro-batch: each replica runs as many, and in stage 3 the same modules in the same
  order, since their weights are gathered together.
- The norm is the native one, every element counted once, and DeepSpeed is told not to clip.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.elastic.distillation import MicroLoss
from megatron_essh.elastic.plan import FULL
from megatron_essh.errors import UserError
from megatron_essh.evaluation.perplexity import Batches, score
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.dealing import deal_in_step
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.engine import NativeEngine, Stage
from megatron_essh.training.step_sums import StepSums
from megatron_essh.training.zero_shares import (
    Share,
    ShareState,
    find_shares,
    join_weights,
    optimized,
    publish_weights,
)

SETTINGS = Path(__file__).resolve().parents[2] / "configs" / "deepspeed"
OURS = {
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "train_batch_size": "training.global_batch",
    "gradient_accumulation_steps": "training.global_batch and the layout",
    "gradient_clipping": "optimizer.clip_norm",
    "gradient_allreduce_op": "no setting: gradients are sums",
    "prescale_gradients": "no setting: gradients are sums",
    "gradient_predivide_factor": "no setting: gradients are sums",
    "optimizer": "optimizer",
    "scheduler": "optimizer",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "torch_autocast": "training.precision",
    "data_types": "no setting: gradients are fp32",
    "communication_data_type": "no setting: gradients are fp32",
}
"""DeepSpeed's settings that the run's config has the word on, and where."""


FREE = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "parameter_alignment",
    "sub_group_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
)
"""DeepSpeed's settings of ZeRO that are its file's to choose."""


class DeepSpeedEngine(NativeEngine):
    """As `NativeEngine`, with what parallel.zero_stage says dealt out over the replicas of `place`.

    Raises:
        UserError: as there; or the file of DeepSpeed's settings is missing, broken, or contradicts the config.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: RunConfig,
        stage: Stage,
        place: Mesh | torch.device,
        *,
        eod: int | None = None,
    ) -> None:
        self.zero_stage = config.parallel.zero_stage
        settings = deepspeed_settings(config)
        super().__init__(model, config, stage, place, eod=eod)
        self._kept = [(p, p.grad) for p in self.model.parameters()]
        """Stages 0 and 1: where gradients are kept; DeepSpeed lets go of them in every step."""
        _part_groups(self.optimizer)
        self._root = _Root(self.model)
        self._joined = not dist.is_initialized()
        """Whether one process became a group of one for DeepSpeed's sake."""
        self._deepspeed = _initialize(self._root, self.optimizer, self.mesh, settings)
        self._deepspeed.set_gradient_accumulation_boundary(True)
        self._summed: list[Tensor] | None = None
        """Stage 2: a step's gradients so far, a flat tensor a group."""
        self._teaches: Iterator[bool] = iter(())
        """Stage 3: by the micro-batches to come, whether a teacher runs in any replica."""
        self._shares: dict[str, Share] = {}
        if self.zero_stage:
            join_weights(self._zero, self.model, self.zero_stage, self.mesh)
            self._shares = find_shares(self._zero, self.model, self.zero_stage, self.mesh)
            flats = optimized(self._zero, self.zero_stage)
            self.state = ShareState(self.model, self.optimizer, self.statistics, self.mesh, self._shares, flats)
            self.state.make_moments()
            told = [self.mesh.tp_rank == 0 or _is_sharded(p) for p in self.model.parameters()]
            self._speaks = torch.tensor(told, device=self.device)

    @property
    def _zero(self) -> Any:
        """DeepSpeed's optimizer: from stage 1 on, its own around ours."""
        return self._deepspeed.optimizer

    @property
    def _reduces_each(self) -> bool:
        """Whether gradients are reduced after every micro-batch."""
        return self.zero_stage >= 2

    def _prepare_gradients(self) -> None:
        if not self._reduces_each:
            super()._prepare_gradients()
            if self.zero_stage:
                self._passes = None  # DeepSpeed's hooks on gradients run in Python, which a replay leaves out
        elif self.zero_stage == 2:
            self._refresh_copies()

    def _refresh_copies(self) -> None:
        if self.zero_stage < 3:  # whole weights are there
            super()._refresh_copies()

    # -- who runs what ----------------------------------------------------------------------------------------------

    def _deal(self, costs: Sequence[float]) -> list[list[int]]:
        together = self._reduces_each and self.mesh.dp > 1
        return deal_in_step(costs, self.mesh.dp) if together else super()._deal(costs)

    # -- one step ---------------------------------------------------------------------------------------------------

    def forward_backward(self, tokens: Tensor, plan: Sequence[int]) -> tuple[StepSums, int]:
        if self.zero_stage == 3:
            compared = self.stage == "pretrain" and self.config.elastic.kl_weight > 0
            places = zip(*self._deal(self._slot_costs(plan)), strict=True)
            teaches = [compared and any(plan[slot] != FULL for slot in slots) for slots in places]
            each = self.config.elastic.slot_sequences // self.config.training.micro_batch
            self._teaches = iter([taught for taught in teaches for _ in range(each)])
        return super().forward_backward(tokens, plan)

    def _micro_batch(
        self, inputs: Tensor, labels: Tensor, documents: Tensor | None, budget: int, valid: int
    ) -> MicroLoss:  # fmt: skip
        if not self._reduces_each:
            return super()._micro_batch(inputs, labels, documents, budget, valid)
        others_teach = next(self._teaches, False) and budget == FULL

        def run() -> tuple[Tensor | None, ...]:
            with self._autocast():  # in here: DeepSpeed ends an autocast that is not its own
                loss = self._loss(inputs, labels, documents, budget, None)
                if others_teach:
                    with torch.no_grad():
                        self.model.hidden(inputs, documents_BT=documents)
            return loss.objective, loss.cross_entropy, loss.full_cross_entropy, loss.divergence

        replicas = self.mesh.dp if self.zero_stage == 3 else 1
        with self._deepspeed.coalesce_grad_reduction():
            objective, cross_entropy, full_cross_entropy, divergence = self._deepspeed(run)
            self._deepspeed.backward(objective * (replicas / valid), scale_wrt_gas=False)
            self._complete_gradients()
        if self.zero_stage == 2:
            self._add_up()
        return MicroLoss(objective.detach(), cross_entropy, full_cross_entropy, divergence)

    def _complete_gradients(self) -> None:
        """Stages 2 and 3: a gradient for every parameter, that of undealt ones of all positions."""
        undealt = []
        for parameter in self.model.parameters():
            if parameter.grad is None and self.zero_stage == 2:  # a neutral gate's bias; in stage 3 it stays at zero
                parameter.grad = torch.zeros_like(parameter)
            if not _is_sharded(parameter) and parameter.grad is not None:
                undealt.append(parameter.grad)
        if self.config.parallel.sequence_parallel:
            flat = torch.cat([gradient.flatten() for gradient in undealt])
            dist.all_reduce(flat, group=self.mesh.tp_group)
            for gradient, summed in zip(undealt, flat.split([g.numel() for g in undealt]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def _add_up(self) -> None:
        """Stage 2: add the micro-batch's reduced gradients to the step's."""
        zero = self._zero
        flats = [_flat(zero.averaged_gradients[group]) for group in range(len(zero.bit16_groups))]
        if self._summed is None:
            self._summed = flats
        else:
            torch._foreach_add_(self._summed, flats)
        for group in range(len(flats)):
            zero.averaged_gradients[group] = None

    def _reduce_gradients(self) -> None:
        zero = self._zero
        if not self._reduces_each:
            if self._buckets is not None and self.config.parallel.sequence_parallel:
                self._buckets.reduce(None, self.mesh.tp_group)
            self._deepspeed.allreduce_gradients()
        if self.zero_stage in (1, 2):
            if self.zero_stage == 1:
                self._summed = [_flat(zero.averaged_gradients[group]) for group in range(len(zero.bit16_groups))]
            assert self._summed is not None
            for group, flat in enumerate(self._summed):
                zero.averaged_gradients[group] = [flat]
            self._summed = None

    @property
    def _norms_of_parts(self) -> bool:
        return self.zero_stage > 0 or super()._norms_of_parts

    def _gradient_norms(self) -> Tensor:
        if self.zero_stage == 0:
            return super()._gradient_norms()
        norms = torch.zeros(len(self._shares), device=self.device)
        held = [(i, share) for i, share in enumerate(self._shares.values()) if share.end > share.start]
        if held:
            places = torch.tensor([i for i, _ in held]).to(self.device)
            norms[places] = torch.stack(torch._foreach_norm([share.gradient(self._zero) for _, share in held]))
        return norms

    def _clip(self, total: Tensor) -> Tensor:
        if self.zero_stage == 0:
            return super()._clip(total)
        # Of a broken step 1: stage 3 keeps the tensors, and does not clear what pads them.
        factor = (self.config.optimizer.clip_norm / (total + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        torch._foreach_mul_([g for group in self._zero.averaged_gradients.values() for g in group], factor)
        return total

    def _update(self) -> None:
        self._deepspeed.step()

    def _clear_gradients(self) -> None:
        """After an update, or in its place."""
        if self.zero_stage:
            self._zero.zero_grad(set_to_none=True)
            for group in self._zero.averaged_gradients:
                self._zero.averaged_gradients[group] = None
        if not self._reduces_each:
            for parameter, gradient in self._kept:
                parameter.grad = gradient
            super()._clear_gradients()

    # -- ordering and evaluation ------------------------------------------------------------------------------------

    def _weights_changed(self) -> None:
        if self.zero_stage:
            publish_weights(self._zero, self.zero_stage)
        super()._weights_changed()

    def evaluate(self, batches: Batches, capacity: Capacity | None = None) -> float:
        """As the native engine's; in stage 3 every replica runs as many batches, the last ones more than once."""
        if self.zero_stage < 3:
            return super().evaluate(batches, capacity)
        mesh, training = self.mesh, self.config.training
        kept = list(batches)
        totals = torch.zeros(2, len(kept), dtype=torch.float64)
        for first in range(0, len(kept), mesh.dp):
            index = min(first + mesh.dp_rank, len(kept) - 1)
            with torch.no_grad():
                part = self._deepspeed(
                    lambda: score(self.model, [kept[index]], capacity, cut_at=self.cut_at,  # noqa: B023
                                  precision=training.precision, chunk=training.loss_chunk)
                )  # fmt: skip
            if first + mesh.dp_rank < len(kept):
                totals[:, index] = torch.tensor([part.total, part.tokens], dtype=torch.float64)
        return self._mean_loss(totals)

    def compare_replicas(self) -> None:
        if self.zero_stage < 3:  # in stage 3 no two replicas hold the same
            super().compare_replicas()

    def close(self) -> None:
        """End DeepSpeed's engine in order: without it a process may abort after its work is done."""
        self._deepspeed.destroy()
        self._shares, self._kept, self._root = {}, [], None  # type: ignore[assignment]
        self._deepspeed = None
        del self.optimizer, self.state
        gc.collect()
        from deepspeed.utils import groups

        groups.mpu = None
        dist.barrier()
        if self._joined:
            dist.destroy_process_group()


class _Root(nn.Module):
    """What DeepSpeed takes for the model: its forward pass runs what it is given, with the model's modules."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def deepspeed_settings(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's settings for a run: those of its file, and those that the run's config has the word on.

    Raises:
        UserError: the file is missing or no JSON object, or contradicts the config.
    """
    stage, own = config.parallel.zero_stage, config.parallel.deepspeed_config
    path = SETTINGS / f"zero{stage}.json" if own is None else Path(own)
    settings: dict[str, Any] = {}
    if own is not None or stage:
        try:
            settings = json.loads(path.read_text())
        except FileNotFoundError:
            raise UserError(f"parallel.deepspeed_config: {path}: no such file") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: no JSON: {error}") from None
        if not isinstance(settings, dict):
            raise UserError(f"{path}: a JSON object is wanted, of DeepSpeed's settings")
    for key in OURS:
        if key in settings:
            raise UserError(f"{path}: {key} is set by the run's config ({OURS[key]}); remove it")
    zero = settings.setdefault("zero_optimization", {})
    fixed = {"stage": stage, "overlap_comm": False}
    if stage in (1, 2):
        fixed |= {"compute_grad_norm": False, "contiguous_gradients": stage == 2}
    if stage == 3:  # what is gathered must not depend on what was run before
        fixed |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    for key in zero.keys() - fixed.keys():
        if key not in FREE:
            raise UserError(f"{path}: zero_optimization.{key} is no setting of this engine; it takes {', '.join(FREE)}")
    for key, value in fixed.items():
        if zero.get(key, value) != value:
            needed = "parallel.zero_stage" if key == "stage" else "this engine"
            raise UserError(f"{path}: zero_optimization.{key} is {zero[key]}, {needed} needs {value}; set or remove it")
    settings["zero_optimization"] = zero | fixed
    return settings | {
        "train_micro_batch_size_per_gpu": 1,  # of what we call a step: DeepSpeed counts nothing for us
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device
    }


def _initialize(root: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, settings: dict[str, Any]) -> Any:
    """DeepSpeed's engine of `root`."""
    os.environ.setdefault("DS_ACCELERATOR", mesh.device.type)
    os.environ["LOCAL_RANK"] = str(mesh.device.index or 0)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    if mesh.device.type == "cpu":  # a minute of compiling, for exchanges that need no such speed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, mpu=mesh.mpu(), config=settings)
    return engine


def _part_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give the parameters that every tensor-parallel rank holds whole groups of their own.

    Laid one behind the other they then have the same places on all of those ranks, and are updated alike to the last
    bit: what a vectorised update rounds depends on an element's place.
    """
    parted = []
    for group in optimizer.param_groups:
        for sharded in (True, False):
            members = [parameter for parameter in group["params"] if _is_sharded(parameter) == sharded]
            if members:
                parted.append(group | {"params": members})
    optimizer.param_groups[:] = parted


def _is_sharded(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
