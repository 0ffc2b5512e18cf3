"""Builds csrc/ as megatron_essh._index and puts CUDA sources into the package; the rest stands in pyproject.toml."""

from pathlib import Path
from shutil import copyfile

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build_py import build_py

CUDA = sorted(map(str, Path("csrc").glob("*.cu")))


class BuildPy(build_py):
    """Copies CUDA sources to megatron_essh/csrc: they are compiled where they run (`ops.cuda_module`)."""

    def run(self) -> None:
        super().run()
        for source, target in self._targets().items():
            self.mkpath(str(Path(target).parent))
            copyfile(source, target)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *CUDA]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._targets().values()]

    def _targets(self) -> dict[str, str]:
        """Where each source goes."""
        return {source: str(Path(self.build_lib, "megatron_essh", source)) for source in CUDA}


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
    cmdclass={"build_ext": build_ext, "build_py": BuildPy},
)
