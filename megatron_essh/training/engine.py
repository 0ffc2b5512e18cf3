"""The native engine: one process, one device (architecture rule 5).

`train_step` is one optimizer step of the recipe: the plan's slots forward and backward, clip, update, unit statistics,
ordering. Everything elastic stands above this file in elastic/; another engine has the same face.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_essh.config import RunConfig
from megatron_essh.data.packing import IGNORED, next_token_task
from megatron_essh.elastic.capacity import Capacity, budget_capacity, full_capacity
from megatron_essh.elastic.distillation import MicroLoss, full_loss, reduced_loss, refinement_loss
from megatron_essh.elastic.ffn_order import UnitStatistics, orders_after, unit_order
from megatron_essh.elastic.plan import FULL, budget_label, pretraining_plan, refinement_plan
from megatron_essh.errors import UserError
from megatron_essh.evaluation.perplexity import Batches, score
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.ops.linear import keep_gradients, refresh_copies
from megatron_essh.training.captured import CapturedPasses
from megatron_essh.training.optimizer import build_optimizer, load_moments, named_moments, updates_done
from megatron_essh.training.schedule import learning_rate

Stage = Literal["pretrain", "refine"]


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    step: int
    loss: float
    """Mean objective a valid token."""
    loss_by_capacity: dict[str, float]
    """Mean cross-entropy a token by the plan's labels (`full`, `8/32`, ...)."""
    divergence: float | None
    """Mean KL (pretraining) or total variation (refinement) a token of the reduced slots."""
    tokens: int
    """Valid tokens."""
    learning_rate: float
    grad_norm: float
    full_slots: int
    slots: int
    ordered: bool
    """Whether the feed-forward units were ordered after the step."""


class NativeEngine:
    """Trains `model` on `device` by `config`'s recipe for `stage`.

    Args:
        eod: id of the end-of-document token; needed where data.document_mask cuts at it.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: RunConfig,
        stage: Stage,
        device: torch.device,
        *,
        eod: int | None = None,
    ) -> None:
        if config.data.document_mask and eod is None:
            raise UserError("data.document_mask is true, but the tokenizer's end-of-document id is not known")
        self.model = model.to(device)
        self.model.recompute = config.training.recompute
        self.config = config
        self.stage = stage
        self.device = device
        self.cut_at = eod if config.data.document_mask else None
        refine = stage == "refine"
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
        self.statistics = UnitStatistics(config.model, config.elastic.statistics_decay, device)
        self._passes: CapturedPasses | None = None
        if device.type == "cuda":
            self._prepare_device()

    def _prepare_device(self) -> None:
        """On a GPU, gradients and low-precision weights are kept in place, so that passes can be recorded."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        keep_gradients(self.model.product_weights())
        self._refresh_copies()
        self._gradient_factor = torch.ones((), device=self.device)
        training = self.config.training
        if training.capture and self.cut_at is None:
            self._passes = CapturedPasses(
                self._device_pass, training.micro_batch, self.config.data.sequence_length, self.device
            )

    def _refresh_copies(self) -> None:
        """After every change of the weights."""
        if self.device.type == "cuda" and self.config.training.precision == "bf16":
            refresh_copies(self.model.product_weights(), torch.bfloat16)

    # -- one step ---------------------------------------------------------------------------------------------------

    def train_step(self, step: int, tokens: np.ndarray | Tensor) -> StepReport:
        """Optimizer step `step` (from 0) on `tokens`, int64 [global_batch, T + 1].

        Raises:
            UserError: the loss or the gradient is not finite; nothing was updated.
        """
        refine = self.stage == "refine"
        plan = refinement_plan(self.config, step) if refine else pretraining_plan(self.config, step)
        report_sums, valid = self.forward_backward(torch.as_tensor(tokens), plan)
        rate = self._learning_rate(step)
        grad_norm = self._clip()
        loss = report_sums.objective / valid
        by_capacity = report_sums.mean_cross_entropy(self.config)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            broken = [label for label, ce in by_capacity.items() if not math.isfinite(ce)]
            raise UserError(
                f"step {step + 1}: loss {loss}, gradient norm {grad_norm} (capacities of the step: "
                f"{', '.join(by_capacity)}; with a loss that is not finite: {', '.join(broken) or 'none'}): "
                "nothing was updated; "
                "start a new run with a lower optimizer.learning_rate or other data"
            )
        self.step(rate)
        ordered = False
        if not refine:
            self.statistics.end_step()
            elastic = self.config.elastic
            if elastic.enabled and orders_after(
                step + 1, self.steps, elastic.ordering_interval, elastic.ordering_until
            ):
                self.order_units()
                ordered = True
        return StepReport(
            step=step,
            loss=loss,
            loss_by_capacity=by_capacity,
            divergence=report_sums.mean_divergence(),
            tokens=valid,
            learning_rate=rate,
            grad_norm=grad_norm,
            full_slots=sum(b == FULL for b in plan),
            slots=len(plan),
            ordered=ordered,
        )

    def forward_backward(self, tokens: Tensor, plan: Sequence[int]) -> tuple[StepSums, int]:
        """Gradients of the step's mean objective; its sums, and the number of valid tokens."""
        inputs, labels, documents = next_token_task(tokens, self.cut_at)
        valid = int((labels != IGNORED).sum())
        if valid == 0:
            raise UserError("a step holds no token to predict: every label follows an end-of-document token")
        sums = StepSums()
        slot, micro = self.config.elastic.slot_sequences, self.config.training.micro_batch
        assert len(tokens) == len(plan) * slot, f"{len(tokens)} sequences for {len(plan)} slots of {slot}"
        counted = [int((piece != IGNORED).sum()) for piece in labels.split(micro)]
        inputs, labels = inputs.to(self.device), labels.to(self.device)  # at once: a copy waits for what runs
        documents = None if documents is None else documents.to(self.device)
        if self.device.type == "cuda":
            self._gradient_factor.fill_(1.0 / valid)
        for index, budget in enumerate(plan):
            for start in range(index * slot, (index + 1) * slot, micro):
                rows = slice(start, start + micro)
                cut = None if documents is None else documents[rows]
                loss = self._micro_batch(inputs[rows], labels[rows], cut, budget, valid)
                sums.add(budget, loss, counted[start // micro])
                if budget == FULL and self._orders_units:
                    self.statistics.count(inputs[rows].numel())
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

    def step(self, rate: float) -> None:
        """Apply the accumulated gradients at learning rate `rate` and clear them."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.device.type != "cuda")
        self._refresh_copies()

    def order_units(self) -> None:
        """Sort every layer's feed-forward units by importance; the full-width function is unchanged."""
        for layer in range(self.config.model.n_layers):
            down = self.model.get_parameter(f"blocks.{layer}.feed_forward.down")
            self.permute(layer, unit_order(self.statistics.mean_square_LN[layer], down))
        self._refresh_copies()

    def permute(self, layer: int, order_N: Tensor) -> None:
        """Reorder a layer's units: weights, both moments and the statistic."""
        for part in ("gate_up", "down"):
            parameter = self.model.get_parameter(f"blocks.{layer}.feed_forward.{part}")
            rows = [
                parameter.data,
                *(v for v in self.optimizer.state.get(parameter, {}).values() if _has_rows(v, parameter)),
            ]
            for tensor in rows:
                tensor.copy_(tensor[order_N])
        self.statistics.permute(layer, order_N)

    def evaluate(self, batches: Batches, capacity: Capacity | None = None) -> float:
        """Mean cross-entropy a valid token of int64 batches [B, T + 1] at `capacity` (None: full)."""
        training = self.config.training
        measured = score(
            self.model, batches, capacity, cut_at=self.cut_at, precision=training.precision, chunk=training.loss_chunk
        )
        return measured.nll

    # -- what a resume needs ----------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a bitwise resume needs besides `state_values`, by name: model.*, moments, statistics, rng."""
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        tensors.update(named_moments(self.model, self.optimizer))
        tensors["statistics.mean_square"] = self.statistics.mean_square_LN
        tensors["rng.torch"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def state_values(self) -> dict[str, int]:
        """JSON-able companions of `state_tensors`."""
        return {"updates": updates_done(self.optimizer)}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, int]) -> None:
        """Put back what `state_tensors` and `state_values` gave.

        Raises:
            UserError: a tensor is missing, unknown or of another shape.
        """
        expected = self.state_tensors()
        random = {name for name in (*expected, *tensors) if name.startswith("rng.")}  # a resume may change device
        missing = sorted(set(expected) - set(tensors) - random)
        unknown = sorted(set(tensors) - set(expected) - random)
        if missing or unknown:
            raise UserError(f"checkpoint: of another model: missing {missing[:3]}, unknown {unknown[:3]}")
        for name, tensor in expected.items():
            if name not in random and tensor.shape != tensors[name].shape:
                raise UserError(
                    f"checkpoint: {name}: shape {tuple(tensors[name].shape)}, the model has {tuple(tensor.shape)}"
                )
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        self._refresh_copies()
        load_moments(self.model, self.optimizer, tensors, int(values["updates"]))
        self.statistics.mean_square_LN.copy_(tensors["statistics.mean_square"])
        if "rng.torch" in tensors:
            torch.set_rng_state(tensors["rng.torch"].cpu())
        if "rng.cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"].cpu(), self.device)

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

    def _clip(self) -> float:
        for parameter in self.model.parameters():
            if parameter.grad is None:  # used by no slot of this step (a neutral gate's bias): its moments still decay
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        return float(norm)

    def _autocast(self) -> AbstractContextManager[object]:
        # Products keep low-precision weights themselves, and a recorded pass must not use a cache from outside it.
        enabled = self.config.training.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=self._passes is None)


class StepSums:
    """Sums over a step's micro-batches, read from the device once, at the end."""

    def __init__(self) -> None:
        self._objective: list[Tensor] = []
        self._cross_entropy: dict[int, list[Tensor]] = {}
        self._tokens: dict[int, int] = {}
        self._divergence: list[Tensor] = []
        self._divergence_tokens = 0

    def add(self, budget: int, loss: MicroLoss, tokens: int) -> None:
        """Count one micro-batch of `tokens` valid tokens."""
        self._objective.append(loss.objective.detach())
        terms = [(budget, loss.cross_entropy)]
        if loss.full_cross_entropy is not None:
            terms.append((FULL, loss.full_cross_entropy))
        for label, ce in terms:
            self._cross_entropy.setdefault(label, []).append(ce)
            self._tokens[label] = self._tokens.get(label, 0) + tokens
        if loss.divergence is not None:
            self._divergence.append(loss.divergence)
            self._divergence_tokens += tokens

    @property
    def objective(self) -> float:
        """Sum of the objective."""
        return float(torch.stack(self._objective).double().sum())

    def mean_cross_entropy(self, config: RunConfig) -> dict[str, float]:
        """Mean cross-entropy a token, by capacity label, the full one first."""
        means = {}
        for budget in sorted(self._tokens, key=lambda b: (b != FULL, -b)):
            total = float(torch.stack(self._cross_entropy[budget]).double().sum())
            means[budget_label(budget, config.elastic)] = total / max(1, self._tokens[budget])
        return means

    def mean_divergence(self) -> float | None:
        """Mean KL or total variation a token of the reduced slots; None where there was none."""
        if not self._divergence:
            return None
        return float(torch.stack(self._divergence).double().sum()) / max(1, self._divergence_tokens)


def _has_rows(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
