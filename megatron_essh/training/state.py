"""What a resume needs of an engine, by name, and how it is dealt out: weights, moments, unit statistics, randomness.

Knows nothing of steps. Names are `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`, `statistics.mean_square` and `rng.*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_essh.elastic.ffn_order import UnitStatistics
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.interleave import Sharding
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.parallel.tensor_parallel import sharding_of
from megatron_essh.training.optimizer import MOMENTS, make_moments, named_moments, set_updates

STATISTIC = "statistics.mean_square"
RANDOM = "rng."
"""What the names of random states begin with."""


class EngineState:
    """The tensors of one rank's `model`, `optimizer` and `statistics`; the model is dealt out over `mesh` already."""

    def __init__(
        self, model: LanguageModel, optimizer: torch.optim.Optimizer, statistics: UnitStatistics, mesh: Mesh
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.statistics = statistics
        self.mesh = mesh
        self._optimized: Sequence[Tensor] = list(model.parameters())
        """What the optimizer updates."""

    def tensors(self) -> dict[str, Tensor]:
        """All of them, this rank's parts: `sharding` and `span` say of what."""
        tensors = self._parameter_tensors()
        tensors[STATISTIC] = self.statistics.mean_square_LN
        tensors["rng.torch"] = torch.get_rng_state()
        if self.mesh.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.mesh.device)
        return tensors

    def _parameter_tensors(self) -> dict[str, Tensor]:
        """Parameters and moments, to read and, after `make_moments`, to write."""
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        tensors.update(named_moments(self.model, self.optimizer))
        return tensors

    def make_moments(self) -> None:
        """Make the moments, zero, that are not there before the first update."""
        make_moments(self.optimizer, self._optimized)

    def span(self, name: str) -> tuple[tuple[int, ...], int, int] | None:
        """None where tensor `name` is all of this tensor-parallel rank's part. Else that part's shape, and which of its
        elements the tensor is: start and end."""
        return None

    def sharding(self, name: str) -> Sharding | None:
        """How tensor `name` is dealt out over a replica's ranks: the statistics along their last dimension."""
        if self.mesh.tp == 1 or name.startswith(RANDOM):
            return None
        if name == STATISTIC:
            return Sharding(self.model.config.ff_width)
        return sharding_of(name.split(".", 1)[1], self.model.config)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Put back what `tensors` gave, on whatever layout: whole tensors or this rank's parts, after `updates`.

        Raises:
            UserError: a tensor is missing, unknown or of another shape.
        """
        self.make_moments()
        expected = self.tensors()
        random = {name for name in (*expected, *tensors) if name.startswith(RANDOM)}  # a resume may change device
        missing = sorted(set(expected) - set(tensors) - random)
        unknown = sorted(set(tensors) - set(expected) - random)
        if missing or unknown:
            raise UserError(f"checkpoint: of another model: missing {missing[:3]}, unknown {unknown[:3]}")
        parts = {name: self._part(name, tensors[name], expected[name]) for name in expected if name not in random}
        for name, part in parts.items():
            expected[name].copy_(part)
        set_updates(self.optimizer, self._optimized, updates)
        if "rng.torch" in tensors:
            torch.set_rng_state(tensors["rng.torch"].cpu())
        if "rng.cuda" in tensors and self.mesh.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"].cpu(), self.mesh.device)

    def load_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the parameters of a whole model by plain name; moments and statistics stay.

        Raises:
            UserError: a tensor is missing or of another shape.
        """
        own = self._parameter_tensors()
        for name, _ in self.model.named_parameters():
            if name not in tensors:
                raise UserError(f"checkpoint: of another model: missing {name}")
            mine = own[f"model.{name}"]
            mine.copy_(self._part(f"model.{name}", tensors[name], mine))

    def _part(self, name: str, whole: Tensor, mine: Tensor) -> Tensor:
        """This rank's part of tensor `name`, shaped as `mine`; `whole` may be that part already."""
        sharding, part = self.sharding(name), whole
        if sharding is not None:
            across = name == STATISTIC
            units = whole.shape[-1 if across else 0]
            if units == sharding.units * sharding.rows:
                part = sharding.take(whole.T if across else whole, self.mesh.tp_rank, self.mesh.tp)
                part = part.T if across else part
        if part.shape != mine.shape:
            raise UserError(f"checkpoint: {name}: shape {tuple(whole.shape)}, the model has {tuple(mine.shape)} here")
        return part

    # -- ordering ---------------------------------------------------------------------------------------------------

    def permute(self, layer: int, order_N: Tensor) -> None:
        """Reorder a layer's feed-forward units: weights, both moments and the statistic."""
        for part in ("gate_up", "down"):
            name = f"blocks.{layer}.feed_forward.{part}"
            rows = self.unit_rows(name)
            self._put_unit_rows(name, rows, (self._permuted(name, tensor, order_N) for tensor in rows))
        statistic_N = self.statistics.mean_square_LN[layer]
        statistic_N.copy_(self._permuted(f"blocks.{layer}.feed_forward.down", statistic_N, order_N))

    def unit_rows(self, name: str) -> list[Tensor]:
        """The parameter `name` and its moments, if there are any yet: all of the part of this tensor-parallel rank."""
        parameter = self.model.get_parameter(name)
        state = self.optimizer.state.get(parameter, {})
        return [parameter.detach(), *(state[moment] for moment in MOMENTS if moment in state)]

    def _put_unit_rows(self, name: str, rows: Sequence[Tensor], changed: Iterable[Tensor]) -> None:
        """Write `changed` in the place of `rows`, which `unit_rows` gave."""
        for tensor, new in zip(rows, changed, strict=True):
            tensor.copy_(new)

    def _permuted(self, name: str, rows: Tensor, order_N: Tensor) -> Tensor:
        """This rank's rows of the whole tensor in its new order; `order_N` is of all units, the same on all ranks."""
        whole = self.model.partition.gather_parameter(name, rows)[order_N]
        return Sharding(self.model.config.ff_width).take(whole, self.mesh.tp_rank, self.mesh.tp)
