"""From a model to what a decode step reads of it, and from a sequence's state to a slot of many and back.

A weight that is stored as a step reads it, in the dtype asked for, is shared with the model; the others are copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_essh.config import ModelConfig
from megatron_essh.elastic.capacity import Capacity, full_capacity
from megatron_essh.errors import UserError
from megatron_essh.inference.quantization import Quantization, quantize
from megatron_essh.model.attention import WindowAttention
from megatron_essh.model.block import Block
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.model.mixer import SpectralMixer
from megatron_essh.model.state import ModelState, ring_positions
from megatron_essh.ops.decode_step.state import DecodeState
from megatron_essh.ops.decode_step.weights import (
    TABLES,
    AttentionWeights,
    DecodeWeights,
    FeedForwardWeights,
    PackedWeight,
    SpectralWeights,
)

FINGERPRINT_ROWS = 8
"""Of the embedding."""


@torch.no_grad()
def pack_model(
    model: LanguageModel,
    capacity: Capacity | None = None,
    dtype: torch.dtype = torch.bfloat16,
    quantization: Quantization | None = None,
) -> DecodeWeights:
    """The model at one capacity, for decode steps on its device.

    Args:
        capacity: the prefix to run; None runs all.
        dtype: bf16 or fp32, of weights and activations.
        quantization: of the weights of products, the head's among them; the embedding that is read stays in `dtype`.

    Raises:
        UserError: the capacity is not within this model, the model is dealt out over ranks, a dtype that steps do not
            take, or weights to quantise that are not finite.
    """
    config = model.config
    if capacity is None:
        capacity = full_capacity(config)
    if not capacity.fits(config):
        raise UserError(f"capacity {capacity}: this model holds {full_capacity(config)} (channels, units)")
    if model.partition.vocabulary is not None:
        raise UserError("decode: this model is dealt out over ranks; export it, and open the export")
    if dtype not in (torch.bfloat16, torch.float32):
        raise UserError(f"dtype {dtype}: decode steps take bfloat16 or float32")

    def packed(weight_RI: Tensor) -> PackedWeight:
        if quantization is not None:
            return quantize(weight_RI, quantization)
        return PackedWeight(weight_RI.detach().to(dtype).contiguous())

    blocks = [block for block in model.blocks if isinstance(block, Block)]
    mixers: list[SpectralWeights | AttentionWeights] = []
    feed_forwards = []
    for block in blocks:
        norm_D = _fp32(block.mixer_norm.weight)
        if block.mixer is not None:
            mixers.append(
                SpectralWeights(
                    norm_D=norm_D,
                    in_proj=packed(_in_proj(block.mixer, capacity.channels)),
                    out_proj=packed(block.mixer.out_proj[: capacity.channels * config.value_width].T),
                    output_scale=capacity.channels**-0.5,
                    tables_KTM=_tables(block.mixer, capacity.channels),
                    beta_K=_fp32(block.mixer.beta[: capacity.channels]),
                    neutral_gates=config.gates == "neutral",
                )
            )
        else:
            assert isinstance(block.attention, WindowAttention)
            mixers.append(
                AttentionWeights(
                    norm_D=norm_D,
                    qkv=packed(block.attention.qkv.flatten(0, 2)),
                    out_proj=packed(block.attention.out_proj.T),
                    heads=config.n_heads,
                )
            )
        feed_forwards.append(
            FeedForwardWeights(
                norm_D=_fp32(block.ff_norm.weight),
                gate_up=packed(block.feed_forward.gate_up[: capacity.ff_width].flatten(0, 1)),
                down=packed(block.feed_forward.down[: capacity.ff_width].T),
            )
        )
    embedding_VD = model.head_weight.detach().to(dtype).contiguous()
    return DecodeWeights(
        embedding_VD=embedding_VD,
        mixers=tuple(mixers),
        feed_forwards=tuple(feed_forwards),
        final_norm_D=_fp32(model.final_norm.weight),
        head=PackedWeight(embedding_VD) if quantization is None else quantize(model.head_weight, quantization),
        eps=config.eps,
        rope_base=config.rope_base,
        modes=config.modes,
        value_width=config.value_width,
        head_dim=config.head_dim,
    )


@contextmanager
def reading(model: LanguageModel, weights: DecodeWeights) -> Iterator[None]:
    """While this lasts, products of the model in the weights' dtype read what is packed, and cast nothing.

    At the packed capacity or below. Nothing is copied, and nothing is left with the model, whose weights may change
    afterwards. The embedding is read as it is, and so is everything where what is packed is quantised.
    """
    lent = [
        (parameter, getattr(parameter, "compute_copy", None), view) for parameter, view in _as_stored(model, weights)
    ]
    try:
        for parameter, _, view in lent:
            parameter.compute_copy = view  # type: ignore[attr-defined]
        yield
    finally:
        for parameter, own, _ in lent:
            if own is None:
                del parameter.compute_copy  # type: ignore[attr-defined]
            else:
                parameter.compute_copy = own  # type: ignore[attr-defined]


def _as_stored(model: LanguageModel, weights: DecodeWeights) -> list[tuple[Tensor, Tensor]]:
    """Each product's parameter, and its packed weight of the parameter's layout: a view of fewer rows."""
    found: list[tuple[Tensor, PackedWeight, bool]] = []
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    for block, mixer, feed_forward in zip(blocks, weights.mixers, weights.feed_forwards, strict=True):
        if block.mixer is not None:
            assert isinstance(mixer, SpectralWeights)
            found += [(block.mixer.in_proj, mixer.in_proj, False), (block.mixer.out_proj, mixer.out_proj, True)]
        else:
            assert isinstance(block.attention, WindowAttention)
            assert isinstance(mixer, AttentionWeights)
            found += [(block.attention.qkv, mixer.qkv, False), (block.attention.out_proj, mixer.out_proj, True)]
        own = block.feed_forward
        found += [(own.gate_up, feed_forward.gate_up, False), (own.down, feed_forward.down, True)]
    return [
        (parameter, packed.values_RI.T if input_major else packed.values_RI.unflatten(0, (-1, *parameter.shape[1:-1])))
        for parameter, packed, input_major in found
        if packed.scale_R is None
    ]


@torch.no_grad()
def fingerprint(weights: DecodeWeights) -> str:
    """Of the model and capacity that were packed, whatever the dtype, the quantisation and the device.

    Of norms, biases, readouts and the embedding's first rows, by whose bits trained models differ; not of all weights.
    Waits for the device.
    """
    # Copies of parameters: what a device computes of them may differ in its last bits.
    copied = [TABLES.index(name) for name in ("write_bias", "read_bias", "clock_bias", "kc", "ks")]
    numbers: list[object] = [weights.eps, weights.rope_base, weights.head_dim]
    parts = [weights.final_norm_D, weights.embedding_VD[:FINGERPRINT_ROWS].bfloat16().float()]
    for mixer, feed_forward in zip(weights.mixers, weights.feed_forwards, strict=True):
        parts += [mixer.norm_D, feed_forward.norm_D]
        if isinstance(mixer, SpectralWeights):
            parts.append(mixer.tables_KTM[:, copied])
            numbers.append(mixer.neutral_gates)
        else:
            numbers.append(mixer.heads)
        numbers.append(feed_forward.down.inputs)
    found = sha256(repr(numbers).encode())
    for part in parts:
        found.update(part.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _fp32(parameter: Tensor) -> Tensor:
    return parameter.detach().float().contiguous()


def _in_proj(mixer: SpectralMixer, channels: int) -> Tensor:
    """[K X, D]; of a constant clock the weights are zero, whatever stands there."""
    weight_KXD = mixer.in_proj[:channels]
    if mixer.config.clock == "constant":
        weight_KXD = weight_KXD.clone()
        weight_KXD[:, mixer.config.value_width + 2 * mixer.config.modes :] = 0
    return weight_KXD.flatten(0, 1)


def _tables(mixer: SpectralMixer, channels: int) -> Tensor:
    """fp32 [K, 9, M] in the order of `weights.TABLES`."""
    table = {name: _fp32(part) for name, part in mixer.tables(channels)._asdict().items()}
    rows = (
        table["write_bias"],
        table["read_bias"],
        table["clock_bias"],
        F.softplus(table["rho_raw"], threshold=40),
        table["theta"].cos(),
        table["theta"].sin(),
        table["kc"],
        table["ks"],
        table["zero_lag"] * table["kc"],
    )
    return torch.stack(rows, dim=1).contiguous()


def new_decode_state(
    config: ModelConfig,
    capacity: Capacity,
    slots: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
) -> DecodeState:
    """The state of `slots` sequences that have taken in nothing.

    Args:
        dtype: of keys and values.
        max_length: tokens a sequence may reach; needed where the window is the whole input, else ignored.

    Raises:
        UserError: no slot, no `max_length` where there must be one, or more than there is memory for.
    """
    if slots < 1:
        raise UserError(f"slots: {slots} hold no sequence; give 1 or more")
    attending = len(config.attention_layers)
    window = config.window if config.window is not None else max_length
    if window is None and attending:
        raise UserError("model.window is null (the whole input): give max_length")
    if window is not None and window < 1:
        raise UserError(f"max_length: {window} tokens; give 1 or more")
    ring = window if window is not None and attending else 0
    spectral = (len(config.spectral_layers), slots, capacity.channels, config.modes, 2, config.value_width)
    kv = (attending, slots, config.n_heads, ring, config.head_dim)
    try:
        return DecodeState(
            torch.zeros(spectral, dtype=torch.float32, device=device),
            torch.zeros(kv, dtype=dtype, device=device),
            torch.zeros(kv, dtype=dtype, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
        )
    except (RuntimeError, TypeError):  # sizes that no memory holds, or no number of 64 bits
        gib = (4 * math.prod(spectral) + 2 * dtype.itemsize * math.prod(kv)) / 2**30
        raise UserError(
            f"{slots:,} sequences: their states, keys and values would take {gib:,.1f} GiB, more than {device} "
            "has; take fewer at a time, or shorter ones"
        ) from None


def put(state: DecodeState, slot_B: Tensor, given: ModelState) -> None:
    """Make the sequences of a model's state those of the slots `slot_B`; what the slots held is gone.

    Nothing is read on the host; of a state on the same device nothing waits for it.

    Args:
        slot_B: int64 [B] on the device, no two alike.
        given: of B sequences, its rings of the same length.
    """
    parts = (
        (state.spectral_LSKM2P, given.spectral),
        (state.keys_LSHWE, [keys_BWHE.transpose(1, 2) for keys_BWHE in given.keys]),
        (state.values_LSHWE, [values_BWHE.transpose(1, 2) for values_BWHE in given.values]),
    )
    for slots_LS, layers in parts:
        if layers:
            slots_LS.index_copy_(1, slot_B, torch.stack(layers).to(slots_LS))
    state.position_S.index_copy_(0, slot_B, given.position_B.to(state.position_S))


def take(state: DecodeState, slot: int) -> ModelState:
    """An independent copy of a slot's sequence as the state of a batch of one: `LanguageModel.step` continues it."""
    position_B = state.position_S[slot : slot + 1].clone()
    return ModelState(
        [spectral_S[slot : slot + 1].clone() for spectral_S in state.spectral_LSKM2P],
        [keys_S[slot : slot + 1].transpose(1, 2).contiguous() for keys_S in state.keys_LSHWE],
        [values_S[slot : slot + 1].transpose(1, 2).contiguous() for values_S in state.values_LSHWE],
        ring_positions(position_B, state.keys_LSHWE.shape[3]),
        position_B,
    )


def copy_slot(state: DecodeState, source: int, target: int) -> None:
    """Make `target`'s sequence a copy of `source`'s, on the device."""
    for tensor_LS in (state.spectral_LSKM2P, state.keys_LSHWE, state.values_LSHWE):
        tensor_LS[:, target] = tensor_LS[:, source]
    state.position_S[target] = state.position_S[source]
