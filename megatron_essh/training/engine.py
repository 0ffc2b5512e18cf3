"""The native engine: AdamW over the whole of each rank's parameters, on one process or many (architecture rule 5).

`train_step` is one optimizer step of the recipe: the plan's slots forward and backward, gradients summed over the
replicas, clip, update, unit statistics, ordering. Everything elastic stands above this file in elastic/, how the model
is dealt out beside it in parallel/; another engine has the same face.

Every rank takes the same steps. What they must agree on (losses, norms, whether the step counts, whether to stop) goes
through one small exchange a step, and all of them decide by its result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_essh.config import RunConfig
from megatron_essh.data.packing import IGNORED, next_token_task
from megatron_essh.elastic.capacity import Capacity, budget_capacity, full_capacity
from megatron_essh.elastic.distillation import MicroLoss, full_loss, reduced_loss, refinement_loss
from megatron_essh.elastic.ffn_order import UnitStatistics, orders_after, unit_order, unit_scores
from megatron_essh.elastic.plan import FULL, budget_label, pretraining_plan, refinement_plan
from megatron_essh.errors import UserError
from megatron_essh.evaluation.perplexity import Batches, score
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.ops.linear import keep_gradients, refresh_copies
from megatron_essh.parallel.dealing import check_batches, deal, slot_costs
from megatron_essh.parallel.gradients import GradientBuckets
from megatron_essh.parallel.interleave import local_count
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.parallel.tensor_parallel import shard_model
from megatron_essh.training.captured import CapturedPasses
from megatron_essh.training.guard import RankTimes, SkipGuard, StepClock, compare_replicas
from megatron_essh.training.optimizer import build_optimizer, updates_done
from megatron_essh.training.schedule import learning_rate
from megatron_essh.training.state import EngineState
from megatron_essh.training.step_sums import Agreed, Skip, StepReport, StepSums, is_finite

Stage = Literal["pretrain", "refine"]


class NativeEngine:
    """Trains `model`, which is whole and the same on every rank, by `config`'s recipe for `stage`.

    Args:
        place: the device of the one process, or the mesh of several.
        eod: id of the end-of-document token; needed where data.document_mask cuts at it.

    Raises:
        UserError: the replicas cannot share the slots of a step evenly.
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
        if config.data.document_mask and eod is None:
            raise UserError("data.document_mask is true, but the tokenizer's end-of-document id is not known")
        mesh = place if isinstance(place, Mesh) else Mesh.single(place)
        refine = stage == "refine"
        check_batches(config, refine, mesh.dp)
        self.mesh = mesh
        self.device = mesh.device
        self.config = config
        self.stage = stage
        if mesh.tp > 1:
            shard_model(model, mesh, sequence_parallel=config.parallel.sequence_parallel)
        self.model = model.to(self.device)
        self.model.recompute = config.training.recompute
        self.cut_at = eod if config.data.document_mask else None
        self.steps = config.refinement.steps if refine else config.training.steps
        budgets = config.refinement.budgets if refine else config.elastic.training_budgets
        self.capacities = {b: budget_capacity(config.model, config.elastic, b) for b in budgets}
        self.capacities[FULL] = full_capacity(config.model)
        self.optimizer = build_optimizer(
            self.model,
            stage,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
            weight_decay=config.refinement.weight_decay if refine else config.optimizer.weight_decay,
        )
        self.statistics = UnitStatistics(
            config.model,
            config.elastic.statistics_decay,
            self.device,
            width=local_count(config.model.ff_width, mesh.tp_rank, mesh.tp),
        )
        self.state = EngineState(self.model, self.optimizer, self.statistics, mesh)
        """What a resume needs, and the order of the units in it."""
        self.times = RankTimes(mesh.world)
        self._clock = StepClock(self.device)
        self._costs: list[float] = []
        """Of what each rank ran in this step."""
        sharded = [bool(getattr(p, "tensor_model_parallel", False)) for p in self.model.parameters()]
        speaks = [mesh.dp_rank == 0 and (mesh.tp_rank == 0 or held) for held in sharded]
        self._speaks = torch.tensor(speaks, device=self.device)
        """By parameter, whether this rank tells the norm of its gradient."""
        self._skips = SkipGuard(config.training.skip_limit)
        self._passes: CapturedPasses | None = None
        self._buckets: GradientBuckets | None = None
        self._blocks_done: list[torch.cuda.Event] = []
        """By block, when the last backward pass was through it: recorded passes record it too. Only where gradients are
        summed beside it."""
        self._gradient_factor = torch.ones((), device=self.device)
        self._prepare_gradients()

    def _prepare_gradients(self) -> None:
        """Keep gradients in place where they are exchanged; on a GPU low-precision weights too, and record passes."""
        cuda = self.device.type == "cuda"
        if cuda or self.mesh.world > 1:
            self._buckets = GradientBuckets(reversed(list(self.model.parameters())), block_of=blocks_of(self.model))
        if not cuda:
            return
        if self.mesh.dp > 1 and self.mesh.tp == 1:
            self._blocks_done = [torch.cuda.Event(external=True) for _ in self.model.blocks]
            self._beside = torch.cuda.Stream(self.device)
            self.model.after_block_backward = lambda layer: self._blocks_done[layer].record()
        keep_gradients(self.model.product_weights())
        self._refresh_copies()
        training = self.config.training
        if training.capture and self.cut_at is None:
            self._passes = CapturedPasses(
                self._device_pass, training.micro_batch, self.config.data.sequence_length, self.device
            )

    def _refresh_copies(self) -> None:
        """After every change of the weights."""
        if self.device.type == "cuda" and self.config.training.precision == "bf16":
            refresh_copies(self.model.product_weights(), torch.bfloat16)

    # -- who runs what ----------------------------------------------------------------------------------------------

    def plan(self, step: int) -> tuple[int, ...]:
        """Each slot's budget at `step`, over all ranks."""
        refine = self.stage == "refine"
        return refinement_plan(self.config, step) if refine else pretraining_plan(self.config, step)

    def rows(self, step: int) -> list[int]:
        """The sequences of the global batch of `step` that `train_step` wants on this rank.

        All of them where documents are cut, because every rank must know how many labels count.
        """
        plan, slot = self.plan(step), self.config.elastic.slot_sequences
        slots: Sequence[int] = range(len(plan))
        if not self._wants_all:
            slots = self._deal(self._slot_costs(plan))[self.mesh.dp_rank]
        return [row for s in slots for row in range(s * slot, (s + 1) * slot)]

    @property
    def _wants_all(self) -> bool:
        return self.mesh.dp == 1 or self.cut_at is not None

    def _deal(self, costs: Sequence[float]) -> list[list[int]]:
        """Which slots each replica runs, in this order."""
        return deal(costs, self.mesh.dp)

    def _slot_costs(self, plan: Sequence[int]) -> list[float]:
        return slot_costs(self.config, self.stage == "refine", plan, self.capacities)

    # -- one step ---------------------------------------------------------------------------------------------------

    def train_step(
        self, step: int, tokens: np.ndarray | Tensor, *, stop: Callable[[], bool] | None = None
    ) -> StepReport:  # fmt: skip
        """Optimizer step `step` (from 0) on `tokens`, int64 [rows, T + 1]: the rows `rows(step)` of its global batch.

        A step whose loss or gradient is not finite on any rank updates nothing on all of them and says so.

        Args:
            stop: whether this rank has been asked to stop; of several ranks, the report tells all of them.

        Raises:
            UserError: more such steps in a row than training.skip_limit.
        """
        plan = self.plan(step)
        sums, valid = self.forward_backward(torch.as_tensor(tokens), plan)
        agreed = self._agree(sums, stop)
        rate = self._learning_rate(step)
        loss = sums.objective / valid
        skipped = None
        if is_finite(loss, agreed.grad_norm) and not agreed.broken_ranks:
            self.step(rate)
        else:
            skipped = self._skip(sums, loss, agreed)
            self._clear_gradients()
            self.statistics.discard()
        self._skips.count(step, skipped)
        refine, elastic = self.stage == "refine", self.config.elastic
        ordered = False
        if not refine:
            self.statistics.end_step(self.mesh.dp_group)
            if elastic.enabled and orders_after(
                step + 1, self.steps, elastic.ordering_interval, elastic.ordering_until
            ):
                self.order_units()
                ordered = True
        return StepReport(
            step=step,
            loss=loss,
            loss_by_capacity=sums.mean_cross_entropy(elastic, refine),
            divergence=sums.mean_divergence(refine or elastic.kl_weight > 0),
            tokens=valid,
            learning_rate=rate,
            grad_norm=agreed.grad_norm,
            full_slots=sum(b == FULL for b in plan),
            slots=len(plan),
            ordered=ordered,
            grad_norm_by_part=agreed.norm_by_part,
            slots_by_capacity=dict(Counter(budget_label(b, elastic) for b in plan)),
            flops=sum(self._slot_costs(plan)) * elastic.slot_sequences * self.config.data.sequence_length,
            skipped=skipped,
            stop=agreed.stop,
        )

    def forward_backward(self, tokens: Tensor, plan: Sequence[int]) -> tuple[StepSums, int]:
        """Gradients of the step's mean objective, summed over all ranks; its sums here, and the valid tokens of all.

        tokens: as `train_step` takes them.
        """
        self._clock.begin()
        slot, micro = self.config.elastic.slot_sequences, self.config.training.micro_batch
        costs = self._slot_costs(plan)
        dealt = self._deal(costs)
        own, per_slot = dealt[self.mesh.dp_rank], slot // micro
        self._costs = [sum(costs[s] for s in dealt[rank // self.mesh.tp]) for rank in range(self.mesh.world)]
        wanted = len(plan) if self._wants_all else len(own)
        assert len(tokens) == wanted * slot, f"{len(tokens)} sequences for {wanted} slots of {slot}"
        inputs, labels, documents = next_token_task(tokens, self.cut_at)
        if self.cut_at is None:
            counted = [micro * labels.shape[1]] * (len(plan) * per_slot)
        else:
            counted = [int((piece != IGNORED).sum()) for piece in labels.split(micro)]
        valid = sum(counted)
        if valid == 0:
            raise UserError("a step holds no token to predict: every label follows an end-of-document token")
        if self._wants_all and self.mesh.dp > 1:
            rows = torch.cat([torch.arange(s * slot, (s + 1) * slot) for s in own])
            inputs, labels = inputs[rows], labels[rows]
            documents = None if documents is None else documents[rows]
        inputs, labels = inputs.to(self.device), labels.to(self.device)  # at once: a copy waits for what runs
        documents = None if documents is None else documents.to(self.device)
        if self.device.type == "cuda":
            self._gradient_factor.fill_(1.0 / valid)
        sums = StepSums(plan, per_slot, counted)
        for place, index in enumerate(s * per_slot + i for s in own for i in range(per_slot)):
            rows_here = slice(place * micro, (place + 1) * micro)
            cut = None if documents is None else documents[rows_here]
            budget = sums.budgets[index]
            sums.add(index, self._micro_batch(inputs[rows_here], labels[rows_here], cut, budget, valid))
        if self._orders_units:
            self.statistics.count(sums.budgets.count(FULL) * micro * labels.shape[1])
        self._clock.reduce()
        self._reduce_gradients()
        self._clock.end()
        return sums, valid

    def _micro_batch(
        self, inputs: Tensor, labels: Tensor, documents: Tensor | None, budget: int, valid: int
    ) -> MicroLoss:  # fmt: skip
        """One micro-batch forward and backward; the objective's gradient is divided by the step's `valid` tokens."""
        if self._passes is not None:
            return self._passes(inputs, labels, budget)
        if self.device.type == "cuda":
            return self._device_pass(inputs, labels, budget, documents)
        with self._autocast():
            loss = self._loss(inputs, labels, documents, budget, None)
        (loss.objective / valid).backward()
        return loss

    def _device_pass(
        self, inputs: Tensor, labels: Tensor, budget: int, documents: Tensor | None = None
    ) -> MicroLoss:  # fmt: skip
        with self._autocast():
            loss = self._loss(inputs, labels, documents, budget, self._gradient_factor)
        loss.objective.backward()
        return loss

    def _reduce_gradients(self) -> None:
        if self._buckets is not None:
            if self._blocks_done:
                assert self.mesh.dp_group is not None
                self._buckets.reduce_beside(self.mesh.dp_group, self._blocks_done, self._beside)
                return
            own_positions = self.config.parallel.sequence_parallel
            self._buckets.reduce(self.mesh.dp_group, self.mesh.tp_group if own_positions else None)
            return
        for parameter in self.model.parameters():
            if parameter.grad is None:  # used by no slot of this step (a neutral gate's bias): its moments still decay
                parameter.grad = torch.zeros_like(parameter)

    def _agree(self, sums: StepSums, stop: Callable[[], bool] | None) -> Agreed:
        """Clip the gradients, and exchange all that ranks decide by: one reduction and one wait for the device."""
        mesh = self.mesh
        names = [name for name, _ in self.model.named_parameters()]
        norms = self._gradient_norms()
        if not self._norms_of_parts:
            total = self._clip(torch.linalg.vector_norm(norms))
        table = sums.table(self.device)
        squares = norms.double().square()
        message = torch.cat([table.flatten(), squares])
        if mesh.world_group is not None:
            stops = float(stop is not None and stop())
            told = torch.tensor([stops, *self.times.row(mesh.rank)], dtype=torch.float64).to(self.device)
            broken = (~squares.isfinite().all()).double()
            # Replicas have the same norms, and the ranks of a replica the same losses: one of each speaks.
            heard = [table.flatten() if mesh.tp_rank == 0 else torch.zeros_like(table).flatten()]
            heard += [squares.masked_fill(~self._speaks, 0.0), broken[None], told]
            message = torch.cat(heard)
            dist.all_reduce(message, group=mesh.world_group)
        start, end = table.numel(), table.numel() + len(names)
        if self._norms_of_parts:
            total = self._clip(message[start:end].sum().sqrt().to(norms.dtype))
        values = torch.cat([message, total.double()[None]]).cpu().numpy()
        sums.settle(values[:start].reshape(tuple(table.shape)))
        squares_by_name = dict(zip(names, values[start:end].tolist(), strict=True))
        if mesh.world_group is None:
            return Agreed(float(values[-1]), squares_by_name, 0, False)
        broken_ranks, stops, *times = values[end:-1].tolist()
        self.times.add(times)
        self.times.note(self._clock.read(), self._costs)
        return Agreed(float(values[-1]), squares_by_name, int(broken_ranks), stops > 0)

    @property
    def _norms_of_parts(self) -> bool:
        """Whether `_gradient_norms` are of parts of the parameters, that others hold the rest of."""
        return self.mesh.tp > 1

    def _gradient_norms(self) -> Tensor:
        """[parameters]: norms of the step's gradients, of what is here."""
        return torch.stack(torch._foreach_norm([p.grad for p in self.model.parameters() if p.grad is not None]))

    def _clip(self, total: Tensor) -> Tensor:
        """Scale the gradients by their norm `total`, which is returned."""
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.optimizer.clip_norm, total)
        return total

    def _skip(self, sums: StepSums, loss: float, agreed: Agreed) -> Skip:
        micro, index = self.config.training.micro_batch, sums.broken
        return Skip(
            loss,
            agreed.grad_norm,
            index,
            None if index is None else (index * micro, (index + 1) * micro),
            None if index is None else budget_label(sums.budgets[index], self.config.elastic),
            tuple(name for name, square in agreed.squares.items() if not is_finite(square)),
        )

    def step(self, rate: float) -> None:
        """Apply the accumulated gradients at learning rate `rate` and clear them."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._update()
        self._clear_gradients()
        self._refresh_copies()

    def _update(self) -> None:
        self.optimizer.step()

    def _clear_gradients(self) -> None:
        if self._buckets is not None:
            self._buckets.zero()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def order_units(self) -> None:
        """Sort every layer's feed-forward units by importance; the full-width function is unchanged."""
        for layer in range(self.config.model.n_layers):
            name = f"blocks.{layer}.feed_forward.down"
            score_N = unit_scores(self.statistics.mean_square_LN[layer], self.state.unit_rows(name)[0])
            self.state.permute(layer, unit_order(self.model.partition.gather_parameter(name, score_N)))
        self._weights_changed()

    def _weights_changed(self) -> None:
        """After weights were written other than by a step."""
        self._refresh_copies()

    def evaluate(self, batches: Batches, capacity: Capacity | None = None) -> float:
        """Mean cross-entropy a valid token of int64 batches [B, T + 1] at `capacity` (None: full).

        The replicas share the batches; all ranks get the mean.
        """
        mesh, training = self.mesh, self.config.training
        kept = list(batches)
        totals = torch.zeros(2, len(kept), dtype=torch.float64)
        for index in range(mesh.dp_rank, len(kept), mesh.dp):
            part = score(
                self.model,
                [kept[index]],
                capacity,
                cut_at=self.cut_at,
                precision=training.precision,
                chunk=training.loss_chunk,
            )
            totals[:, index] = torch.tensor([part.total, part.tokens], dtype=torch.float64)
        return self._mean_loss(totals)

    def _mean_loss(self, totals: Tensor) -> float:
        """Of fp64 losses and tokens [2, batches], each batch's from one replica and 0 from the others."""
        if self.mesh.dp_group is not None:
            exchanged = totals.to(self.device)
            dist.all_reduce(exchanged, group=self.mesh.dp_group)
            totals = exchanged.cpu()
        losses, tokens = totals.tolist()
        return sum(losses) / sum(tokens)

    def compare_replicas(self) -> None:
        """Hold all ranks to the same parameters, where they are to hold the same.

        Raises:
            UserError: on all ranks, naming parameters and ranks that differ.
        """
        compare_replicas(dict(self.model.named_parameters()), self.mesh)

    # -- what a resume needs ----------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a bitwise resume needs besides `state_values`, by name, this rank's parts: see `state`."""
        return self.state.tensors()

    def state_values(self) -> dict[str, int]:
        """JSON-able companions of `state_tensors`."""
        return {"updates": updates_done(self.optimizer), "skipped_in_a_row": self._skips.in_a_row}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
        """Put back what `state_tensors` and `state_values` gave, on whatever layout: parts of here, or whole tensors.

        Raises:
            UserError: a tensor is missing, unknown or of another shape.
        """
        self.state.load(tensors, int(values["updates"]))
        self._skips.in_a_row = int(values.get("skipped_in_a_row", 0))
        self._weights_changed()

    def load_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the parameters of a whole model by plain name; moments and statistics stay.

        Raises:
            UserError: a tensor is missing or of another shape.
        """
        self.state.load_model(tensors)
        self._weights_changed()

    def close(self) -> None:
        """End what the engine holds of other libraries; nothing may be asked of it then. All ranks call it."""

    # -- parts ------------------------------------------------------------------------------------------------------

    @property
    def _orders_units(self) -> bool:
        """Whether anything reads the statistics of units."""
        elastic = self.config.elastic
        return self.stage == "pretrain" and elastic.enabled and elastic.ordering_interval > 0

    def _loss(
        self, inputs: Tensor, labels: Tensor, documents: Tensor | None, budget: int, grad_scale: Tensor | None
    ) -> MicroLoss:
        model, config, capacity = self.model, self.config, self.capacities[budget]
        if self.stage == "refine":
            return refinement_loss(model, config, inputs, labels, documents, capacity, grad_scale=grad_scale)
        if budget == FULL:
            sums_LN = self.statistics.square_sums_LN if self._orders_units else None
            return full_loss(model, config, inputs, labels, documents, sums_LN, grad_scale=grad_scale)
        return reduced_loss(model, config, inputs, labels, documents, capacity, grad_scale=grad_scale)

    def _learning_rate(self, step: int) -> float:
        config = self.config
        if self.stage == "refine":
            peak, warmup, final = config.refinement.learning_rate, config.refinement.warmup_fraction, 0.0
        else:
            optimizer = config.optimizer
            peak, warmup, final = optimizer.learning_rate, optimizer.warmup_fraction, optimizer.final_fraction
        return learning_rate(step, peak=peak, steps=self.steps, warmup_fraction=warmup, final_fraction=final)

    def _autocast(self) -> AbstractContextManager[object]:
        # Products keep low-precision weights themselves, and a recorded pass must not use a cache from outside it.
        enabled = self.config.training.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=self._passes is None)


def blocks_of(model: LanguageModel) -> dict[nn.Parameter, int]:
    """The block of every parameter that is in one."""
    return {parameter: layer for layer, block in enumerate(model.blocks) for parameter in block.parameters()}


def build_engine(
    model: LanguageModel, config: RunConfig, stage: Stage, place: Mesh | torch.device, *, eod: int | None = None
) -> NativeEngine:
    """The engine that parallel.engine names, made as `NativeEngine` is."""
    if config.parallel.engine == "native":
        return NativeEngine(model, config, stage, place, eod=eod)
    from megatron_essh.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(model, config, stage, place, eod=eod)
