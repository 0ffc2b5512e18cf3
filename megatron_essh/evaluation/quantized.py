"""A model that computes with the weights of a quantised one, to see what quantisation costs in perplexity.

The weights are those that decode steps read (`inference.packing`), multiplied out to fp32. Activations are as ever, so
only the rounding of weights is looked at. Scales belong to a capacity: a row's largest weight depends on where it ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_essh.elastic.capacity import Capacity
from megatron_essh.export.loading import build_model
from megatron_essh.export.slice import slice_config, slice_tensors
from megatron_essh.inference.packing import pack_model
from megatron_essh.inference.quantization import Quantization, dequantized
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.ops.decode_step.weights import SpectralWeights


def quantized_model(model: LanguageModel, capacity: Capacity, kind: Quantization) -> tuple[LanguageModel, Tensor]:
    """The standalone model of this capacity with the weights of its products quantised, and its output head [V, D].

    The head is quantised and the embedding is not, so they are two tensors.

    Raises:
        UserError: the capacity is not within `model`, or weights are not finite.
    """
    packed = pack_model(model, capacity, torch.float32, kind)
    tensors = slice_tensors(dict(model.named_parameters()), model.config, capacity)
    for layer, (mixer, feed_forward) in enumerate(zip(packed.mixers, packed.feed_forwards, strict=True)):
        block = f"blocks.{layer}"
        # The model keeps what decode steps read [outputs, inputs] as [inputs, outputs] where outputs are the residual.
        if isinstance(mixer, SpectralWeights):
            found = {"mixer.in_proj": dequantized(mixer.in_proj), "mixer.out_proj": dequantized(mixer.out_proj).T}
        else:
            found = {"attention.qkv": dequantized(mixer.qkv), "attention.out_proj": dequantized(mixer.out_proj).T}
        found["feed_forward.gate_up"] = dequantized(feed_forward.gate_up)
        found["feed_forward.down"] = dequantized(feed_forward.down).T
        for name, weight in found.items():
            stored = tensors[f"{block}.{name}"]
            stored.copy_(weight.reshape(stored.shape))
    built = build_model(tensors, slice_config(model.config, capacity), f"{kind} weights", model.device)
    return built, dequantized(packed.head)
