"""A vocabulary dealt out over tensor-parallel ranks, and the exchanges of its losses (specification, section 7).

Per chunk of positions, and never more than a few numbers a position:

- one `gather` of every distribution's largest logit and sum of exponentials. A gradient holds p, so no rank can begin
  it without the others' sums: one exchange is the least. Gathered pairs, which every rank joins by itself and in the
  same order, make it one, where a MAX and a SUM that needs its result are two;
- for total variation, one `sum_` of sum tier sign(tier - full), [N]. The signs hold both distributions' p, so a rank's
  share of that sum is known only after the gather, and the gradient holds the sum: two exchanges are the least.

The losses' values are in no gradient. They are summed on each rank and then, once a call, by `sum_`: at most four
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

# torch 2.13 calls it by another name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class VocabularyShard:
    """One rank's part of the output head: entry v of the vocabulary is row v div tp of rank v mod tp.

    All ranks call a loss together, with the same hidden states, labels, chunk and factor, and with gradients wanted of
    the same inputs. Every rank holds at least one entry.
    """

    group: dist.ProcessGroup
    """The tensor-parallel ranks; its backend must take tensors of the weight's device."""
    rank: int
    tp: int

    def gather(self, own: Tensor) -> Tensor:
        """[tp, ..]: the ranks' tensors of one shape, the same on all ranks."""
        found = own.new_empty(self.tp, *own.shape)
        _all_gather(found.flatten(0, 1), own.contiguous(), group=self.group)
        return found

    def sum_(self, own: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in place, the same on all ranks."""
        dist.all_reduce(own, group=self.group)
        return own
