"""A model with quantised weights is the model with every product's weights rounded, and nothing else changed."""

import pytest
import torch
from torch.nn import functional as F

from megatron_essh.elastic.capacity import Capacity
from megatron_essh.evaluation.perplexity import score
from megatron_essh.evaluation.quantized import quantized_model
from megatron_essh.inference.quantization import KINDS, dequantized, quantize

PRODUCTS = ("in_proj", "out_proj", "qkv", "gate_up", "down")
INPUT_MAJOR = ("out_proj", "down")


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("capacity", [Capacity(6, 192), Capacity(4, 70), Capacity(1, 64)])
def test_weights_of_products_are_rounded_by_output_row_and_all_else_is_the_tiers(
    kind, capacity, tiny_config, random_model
):
    model = random_model(tiny_config.model)
    built, head_VD = quantized_model(model, capacity, kind)
    assert (built.config.channels, built.config.ff_width) == (capacity.channels, capacity.ff_width)
    full = dict(model.named_parameters())
    for name, weight in built.named_parameters():
        stored = full[name][: len(weight)]
        if name.rpartition(".")[2] not in PRODUCTS:
            assert torch.equal(weight, stored), name
            continue
        flipped = name.endswith(INPUT_MAJOR)
        rows, own_rows = (t.T if flipped else t.flatten(0, -2) for t in (stored, weight))
        assert torch.equal(own_rows, dequantized(quantize(rows, kind))), name
        step = rows.abs().amax(1, keepdim=True) / KINDS[kind][1]
        bound = step / 2 if kind == "int8" else rows.abs() / 16 + step * 2**-10
        assert ((own_rows - rows).abs() <= bound * 1.001).all(), name
        assert not torch.equal(own_rows, rows), name
    assert torch.equal(head_VD, dequantized(quantize(model.head_weight, kind)))


def test_the_given_head_is_the_one_that_is_scored(tiny_config, random_model):
    model = random_model(tiny_config.model)
    batch = torch.randint(0, 264, (2, 25)).numpy()
    head_VD = torch.randn(264, 32)
    found = score(model, [batch], head_VD=head_VD)
    logits = F.linear(model.hidden(torch.from_numpy(batch[:, :-1])), head_VD)
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch[:, 1:]).flatten(), reduction="sum")
    assert found.total == pytest.approx(float(expected), rel=1e-5)
    assert score(model, [batch]).total != pytest.approx(found.total, rel=1e-3)
