"""The closed-form costs against the specification's tables, the built model and a count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megatron_essh.config import ModelConfig, RunConfig, load_config
from megatron_essh.elastic.capacity import Capacity, tier_capacities
from megatron_essh.errors import UserError
from megatron_essh.model.accounting import flops_per_token, parameter_counts, state_bytes, window_kv_bytes
from megatron_essh.model.language_model import LanguageModel

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
CHANNELS = [8, 11, 15, 18, 20, 23, 25, 28, 30, 32]
# fmt: off
TABLES = {
    "370m": (
        [448, 832, 1344, 1792, 2240, 2752, 3136, 3648, 4096, 4608],
        [92_144_664, 118_942_353, 154_672_605, 185_254_998, 214_474_236,
         248_841_333, 274_275_867, 308_642_964, 337_862_202, 370_866_144],
    ),
    "1p5b": (
        [576, 1024, 1664, 2176, 2688, 3392, 3840, 4416, 5056, 5632],
        [474_479_304, 574_901_715, 716_138_295, 827_570_754, 931_219_188,
         1_075_681_791, 1_168_320_177, 1_290_762_684, 1_416_431_214, 1_531_089_696],
    ),
}
# fmt: on
TABLES["1p5b_timing"] = TABLES["1p5b"]
PARTS = ("embedding", "mixer", "attention", "feed_forward")


def config_of(name: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml")


def small_model(**changes: object) -> ModelConfig:
    settings_: dict[str, object] = {
        "d_model": 48,
        "n_layers": 5,
        "channels": 7,
        "modes": 3,
        "value_width": 5,
        "ff_width": 130,
        "vocab_size": 37,
        "attention_layers": (1, 4),
        "window": 11,
        "head_dim": 16,
        "bank_length": 32,
    }
    return ModelConfig(**{**settings_, **changes})  # type: ignore[arg-type]


def cut(model: ModelConfig, capacity: Capacity) -> ModelConfig:
    """The standalone model of a capacity."""
    return ModelConfig(**{**vars(model), "channels": capacity.channels, "ff_width": capacity.ff_width})


def built_parts(model: ModelConfig) -> dict[str, int]:
    """Parameters of the model built on the meta device, by part."""
    with torch.device("meta"):
        built = LanguageModel(model)
    parts = dict.fromkeys([*PARTS, "norms"], 0)
    for name, parameter in built.named_parameters():
        part = next((piece for piece in name.split(".") if piece in PARTS), "norms")
        assert part != "norms" or name.endswith("norm.weight"), name
        parts[part] += parameter.numel()
    return parts


@pytest.mark.parametrize("name", TABLES)
def test_every_tier_has_the_specified_shape_and_parameters(name: str) -> None:
    config = config_of(name)
    widths, parameters = TABLES[name]
    tiers = list(tier_capacities(config.model, config.elastic).values())
    assert tiers == [Capacity(k, n) for k, n in zip(CHANNELS, widths, strict=True)]
    assert [parameter_counts(config.model, tier).total for tier in tiers] == parameters
    assert parameter_counts(config.model).total == parameters[-1]


def test_the_dna_model_has_the_specified_parameters() -> None:
    assert parameter_counts(config_of("dna").model).total == 534_208


@pytest.mark.parametrize("name", NAMES)
def test_the_closed_form_equals_the_built_model_part_by_part_at_every_tier(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a model on the meta device fits no bank")

    monkeypatch.setattr("megatron_essh.model.mixer.build_bank", refuse)
    config = config_of(name)
    for tier in tier_capacities(config.model, config.elastic).values():
        assert vars(parameter_counts(config.model, tier)) == built_parts(cut(config.model, tier))
        assert parameter_counts(cut(config.model, tier)) == parameter_counts(config.model, tier)


@settings(deadline=None, max_examples=30)
@given(
    channels=st.integers(1, 9),
    modes=st.integers(1, 4),
    value_width=st.integers(1, 9),
    ff_width=st.integers(1, 100),
    layers=st.integers(1, 4),
    attention=st.sets(st.integers(0, 3)),
)
def test_the_closed_form_equals_the_built_model_at_odd_shapes(
    channels: int, modes: int, value_width: int, ff_width: int, layers: int, attention: set[int]
) -> None:
    model = small_model(
        channels=channels,
        modes=modes,
        value_width=value_width,
        ff_width=ff_width,
        n_layers=layers,
        attention_layers=tuple(sorted(i for i in attention if i < layers)),
    )
    assert vars(parameter_counts(model)) == built_parts(model)


@pytest.mark.parametrize(("name", "state", "kv"), [("370m", 1.09, 22.02), ("1p5b", 3.28, 50.33)])
def test_state_and_window_cache_have_the_specified_sizes(name: str, state: float, kv: float) -> None:
    model = config_of(name).model
    assert state_bytes(model) / 1e6 == pytest.approx(state, abs=0.005)
    assert window_kv_bytes(model) / 1e6 == pytest.approx(kv, abs=0.005)
    assert window_kv_bytes(model, 99) == window_kv_bytes(model)


@pytest.mark.parametrize("capacity", [None, Capacity(1, 64), Capacity(5, 130)])
@pytest.mark.parametrize("window", [11, None])
def test_cache_bytes_are_those_of_the_models_own_state(capacity: Capacity | None, window: int | None) -> None:
    model = small_model(window=window)
    with torch.device("meta"):
        built = LanguageModel(model)
    state = built.init_state(1, capacity, max_length=23, dtype=torch.bfloat16)
    assert state_bytes(model, capacity) == sum(t.nbytes for t in state.spectral)
    assert window_kv_bytes(model, 23) == sum(t.nbytes for t in [*state.keys, *state.values])


def test_the_cache_of_a_model_without_a_window_has_a_size_for_a_given_length_only() -> None:
    with pytest.raises(UserError, match="sequence_length"):
        window_kv_bytes(small_model(window=None))
    assert window_kv_bytes(small_model(window=None, attention_layers=())) == 0


@pytest.mark.parametrize(("length", "window"), [(1, 11), (7, 11), (11, 11), (40, 11), (13, None)])
def test_flops_agree_with_a_count_by_hand(length: int, window: int | None) -> None:
    model, capacity = small_model(window=window), Capacity(4, 64)
    flops = flops_per_token(model, capacity, sequence_length=length)
    counts = parameter_counts(model, capacity)
    spectral, attention = 3, 2
    # every weight but the tables, biases, norms and embedding is multiplied once
    vectors = spectral * 4 * (8 * 3 + 1)
    assert flops.projections == 2 * (counts.mixer - vectors + counts.attention + counts.feed_forward)
    assert flops.head == 2 * 37 * 48
    seen = sum(min(t + 1, window or length) for t in range(length))
    assert flops.attention == attention * 2 * 2 * 48 * seen // length
    rotate_and_decay, write, read, zero_lag = 6, 2, 4, 2
    per_value = 3 * (rotate_and_decay + write + read) + zero_lag
    assert flops.scan == spectral * 4 * 5 * per_value
    assert flops.forward == flops.projections + flops.head + flops.scan + flops.attention
    assert flops.training == 3 * flops.forward


@pytest.mark.parametrize("capacity", [None, Capacity(4, 64)])
def test_projection_flops_are_those_that_pytorch_counts(
    capacity: Capacity | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESSH_CACHE", str(tmp_path))
    model = small_model()
    built = LanguageModel(model, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built(torch.zeros(1, 8, dtype=torch.int64), capacity)
    by_operator = counter.get_flop_counts()["Global"]
    # products with a weight are matrix products; scan and attention use batched ones
    flops = flops_per_token(model, capacity, sequence_length=8)
    assert by_operator[torch.ops.aten.mm] == 8 * (flops.projections + flops.head)


@pytest.mark.parametrize("capacity", [Capacity(8, 64), Capacity(7, 131), Capacity(0, 64), Capacity(1, 0)])
def test_a_capacity_that_is_not_within_the_model_is_refused(capacity: Capacity) -> None:
    model = small_model()
    for cost in (parameter_counts, state_bytes, lambda *a: flops_per_token(*a, sequence_length=8)):
        with pytest.raises(UserError, match=f"capacity {capacity}: this model holds up to 7,130"):
            cost(model, capacity)
