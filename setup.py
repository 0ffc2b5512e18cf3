"""Builds csrc/ as megatron_essh._index; everything else about the package stands in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

index = Pybind11Extension(
    "megatron_essh._index",
    ["csrc/index.cpp"],
    depends=sorted(map(str, Path("csrc").glob("*.hpp"))),
    cxx_std=17,
    # No fused multiply-add: a blend's products are rounded as NumPy rounds them, on every machine.
    extra_compile_args=["-O3", "-ffp-contract=off", "-pthread"],
    extra_link_args=["-pthread"],
)

setup(
    ext_modules=[index],
    cmdclass={"build_ext": build_ext},
)
