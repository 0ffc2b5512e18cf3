"""Where a model's weights are, as the model sees it: all here.

Whoever deals a model out puts another in the place of `LanguageModel.partition`; the model itself then runs the share
of every capacity that it holds, and knows nothing more of it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from megatron_essh.elastic.capacity import Capacity
from megatron_essh.ops.linear_loss import VocabularyShard


class Whole:
    """The plain case: every weight is here, and nothing is exchanged."""

    vocabulary: VocabularyShard | None = None
    """Which entries of the vocabulary the output head holds, for the losses; None: all."""

    def share(self, capacity: Capacity) -> Capacity:
        """How many of a capacity's channels and units are here; of a part, none may be."""
        return capacity

    def embed(self, weight_VD: Tensor, tokens_BT: Tensor) -> Tensor:
        """The tokens' rows of the embedding: the residual stream before the first block."""
        return F.embedding(tokens_BT, weight_VD)

    def leave(self, y_BTD: Tensor) -> Tensor:
        """What a sub-layer adds to the residual stream, from what its units here give."""
        return y_BTD

    def enter_head(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states as the output head takes them: of all positions, their gradient summed over the head."""
        return hidden_BTD

    def gather_parameter(self, name: str, local: Tensor) -> Tensor:
        """The whole parameter `name`, or a tensor of its shape such as its gradient or moment, from what is here."""
        return local
