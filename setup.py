"""Builds csrc/ as megatron_essh._index; everything else about the package stands in pyproject.toml."""

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

setup(
    ext_modules=[Pybind11Extension("megatron_essh._index", ["csrc/index.cpp"], cxx_std=17)],
    cmdclass={"build_ext": build_ext},
)
