"""Measured rates of GPUs, each with what measured it, and their scaling to GPUs that nobody has measured here.

`<gpu>.json` holds what was measured on a kind of GPU; `datasheets.json` the makers' figures of all kinds. A GPU without
a file of its own takes H200's rates, times the ratio of the data sheets' figures that each rate depends on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from megatron_essh.errors import UserError

MEASURED_ON = "h200"
"""Whose rates are scaled to GPUs that have no file."""
NETWORK_SHARE = 0.8
"""Of the data sheet's network rate, what an exchange is taken to reach. Assumed, not measured."""
NETWORK_HOP = 1e-5
"""Seconds that each doubling of the number of nodes adds to an exchange. Assumed, not measured."""

SCALED_BY = {
    "product_flops": "bf16_flops",
    "attention_flops": "bf16_flops",
    "memory_bytes": "bandwidth",
    "optimizer_bytes": "bandwidth",
    "link_bytes": "link",
}
"""The data sheet's figure that a rate grows with."""
TIME_SCALED_BY = {"scan_fixed": "bandwidth", "scan_per_value": "bandwidth"}
"""The figure that a time shrinks with."""


@dataclass(frozen=True)
class Figure:
    """A rate, and where it is from."""

    value: float
    unit: str
    source: str
    """What measured it, or what it was scaled from."""


@dataclass(frozen=True)
class Rates:
    """What a kind of GPU does, from `figures` by the names of `<gpu>.json` and `network_bytes`."""

    gpu: str
    name: str
    measured: bool
    figures: dict[str, Figure]

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value


def _read(name: str) -> Any:
    return json.loads(files(__package__).joinpath(name).read_text("utf-8"))


def known_gpus() -> list[str]:
    """The kinds that `load_rates` takes."""
    return list(_read("datasheets.json")["gpus"])


def load_rates(gpu: str) -> Rates:
    """Rates of a kind of GPU, such as h200.

    Raises:
        UserError: no data sheet of it is here.
    """
    sheets = _read("datasheets.json")["gpus"]
    if gpu not in sheets:
        raise UserError(f"GPU {gpu!r}: no rates of it; expected one of {', '.join(sheets)}")
    sheet, base = sheets[gpu], sheets[MEASURED_ON]
    measured = files(__package__).joinpath(f"{gpu}.json").is_file()
    table = _read(f"{gpu if measured else MEASURED_ON}.json")
    figures = {}
    for name, entry in table["figures"].items():
        value, source = float(entry["value"]), f"measured: {entry['measured_by']}"
        scale = SCALED_BY.get(name) or TIME_SCALED_BY.get(name)
        if not measured and name == "device_memory":
            value, source = sheet["memory_bytes"], "data sheet, not measured"
        elif not measured:
            if scale is None:
                source = f"scaled, not measured: {MEASURED_ON}'s, as it is"
            else:
                ratio = sheet[scale] / base[scale]
                value = value * ratio if name in SCALED_BY else value / ratio
                source = f"scaled, not measured: {MEASURED_ON}'s by the data sheets' {scale}, {ratio:.3g} times"
        figures[name] = Figure(value, entry["unit"], source)
    figures["network_bytes"] = Figure(
        sheet["network"] * NETWORK_SHARE,
        "B/s a GPU",
        f"not measured: {NETWORK_SHARE:.0%} of the data sheet's {sheet['network'] / 1e9:.0f} GB/s "
        f"({sheet['network_name']})",
    )
    return Rates(gpu, sheet["name"], measured, figures)
