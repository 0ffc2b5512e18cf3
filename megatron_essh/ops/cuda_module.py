"""A CUDA source file as kernels: built by nvcc when first needed, kept on disk, launched through the driver.

Knows nothing of what the kernels compute. A source includes no other file of ours: a built file is named by the hash
of the source, its defines, the flags and the compiler's version, and ends with the hash of its contents. The cache is
a convenience: what is wrong with it costs a warning and a build.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from megatron_essh.errors import UserError
from megatron_essh.files import write_atomically
from megatron_essh.spectral.cache import ENVIRONMENT_VARIABLE, cache_directory

FLAGS = ("-cubin", "-O3", "-std=c++17")
OTHER_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
"""Variables from which nvcc takes more of them."""
SOURCES = (Path(__file__).resolve().parents[2] / "csrc", Path(__file__).resolve().parents[1] / "csrc")
"""Where sources are: of a checkout; of an installed package, in which setup.py puts a copy."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_QUOTED_LINES = 6  # of what went wrong, in a warning
# Numbers of the driver's interface.
_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEVICE_SHARED = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def source(name: str | Path) -> Path:
    """The CUDA source file of this name; a whole path is itself.

    Raises:
        UserError: it is neither in the checkout nor in the installed package.
    """
    places = [folder / name for folder in SOURCES]
    for path in places:
        if path.is_file():
            return path
    raise UserError(f"{name}: neither {places[0]} nor {places[1]} is there; install the package anew")


@cache
def nvcc() -> Path | None:
    """The compiler: of $CUDA_HOME or $CUDA_PATH, on the PATH, or where toolkits are installed."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [*(f"{root}/bin/nvcc" for root in roots if root), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


def build(source: Path, capability: tuple[int, int], defines: Mapping[str, int]) -> bytes:
    """The source's machine code for GPUs of a compute capability, its macros `defines` given these values.

    Raises:
        UserError: no nvcc, it cannot be run, or it refuses the source.
        OSError: no temporary folder.
    """
    compiler = nvcc()
    if compiler is None:
        raise UserError(f"{source.name}: no nvcc to build it; put it on the PATH, or set CUDA_HOME")
    arch = f"{capability[0]}{capability[1]}"
    flags = [*FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", *(f"-D{k}={v}" for k, v in defines.items())]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.cubin"
        done = _call(compiler, *flags, str(source), "-o", str(target))
        if done.returncode == 0 and target.is_file() and (code := target.read_bytes()):
            return code
    said = f"{done.stdout}\n{done.stderr}".strip()[:2000]
    raise UserError(f"{source}: {compiler} could not build it for sm_{arch}:\n{said}")


def built(source: Path, capability: tuple[int, int], defines: Mapping[str, int]) -> bytes:
    """As `build`, from the disk cache where it has been built before."""
    compiler = nvcc()
    key = hashlib.sha256(source.read_bytes())
    version = None if compiler is None else _version(compiler)
    flags = (*FLAGS, *(os.environ.get(name) for name in OTHER_FLAGS))
    key.update(repr((flags, capability, sorted(defines.items()), version)).encode())
    try:
        path = cache_directory() / f"{source.stem}-{key.hexdigest()[:32]}.cubin"
    except OSError as error:
        _warn(f"{error}; set ${ENVIRONMENT_VARIABLE} to a directory to keep them")
        return build(source, capability, defines)
    code = _read(path)
    if code is None:
        code = build(source, capability, defines)
        try:
            write_atomically(path, code + hashlib.sha256(code).digest())
        except OSError as error:
            _warn(
                f"{path.parent}: cannot be written ({error.strerror or error}); every process builds its kernels anew; "
                f"set ${ENVIRONMENT_VARIABLE} to a writable directory"
            )
    return code


def _read(path: Path) -> bytes | None:
    """An entry of the cache, if there is a sound one."""
    try:
        entry = path.read_bytes()
    except OSError:  # none; or one that cannot be read, nor perhaps be replaced, which is then said
        return None
    code, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() == digest:
        return code
    _warn(f"{path}: damaged; building it again")
    return None


def _warn(message: str) -> None:
    warnings.warn(f"kernel cache: {message}", RuntimeWarning, stacklevel=3)


@cache
def _version(compiler: Path) -> str:
    return _call(compiler, "--version").stdout


def _call(compiler: Path, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([str(compiler), *words], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise UserError(f"{compiler}: cannot be run ({error.strerror}); set CUDA_HOME to a CUDA toolkit") from None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _ask(what: str, function: str, *arguments: object) -> None:
    """Call the driver."""
    code = getattr(_driver(), function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({code})")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of a value that is an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class CudaModule:
    """The kernels of a source file on one device."""

    def __init__(self, source: Path, device: torch.device, defines: Mapping[str, int]) -> None:
        """Builds or finds the kernels and loads them.

        Raises:
            UserError, OSError: see `build`; or the driver cannot load what nvcc built.
            RuntimeError: the current stream is being recorded.
        """
        self._device, self._source = device, source
        self._module = ctypes.c_void_p()
        self._kernels: dict[str, tuple[ctypes.c_void_p, int]] = {}
        with torch.cuda.device(device):
            self._refuse_recording()
            code = built(source, torch.cuda.get_device_capability(device), defines)
            torch.cuda.synchronize()  # the driver needs the context that torch makes
            try:
                _ask("the driver cannot load it", "cuModuleLoadData", ctypes.byref(self._module), code)
            except RuntimeError as error:
                raise UserError(f"{source}, built by {nvcc()}: {error}; is that newer than the driver?") from None

    def shared_bytes(self, name: str) -> int:
        """Bytes of dynamic shared memory that a block of this kernel may have."""
        return self._kernel(name)[1]

    def launch(
        self, name: str, blocks: int, threads: int, shared_bytes: int, params: ctypes.Structure, *, dependent: bool
    ) -> None:
        """Launch a kernel of one parameter, given by value, on the current stream.

        Args:
            shared_bytes: of dynamic shared memory, for each block.
            dependent: it may begin before the kernel ahead of it on the stream has ended, and itself waits for what
                that one writes (`griddepcontrol.wait`). For GPUs of compute capability 9.0 and up.

        Raises:
            RuntimeError: what the driver says; or the stream is being recorded and the kernel has not run before.
        """
        with torch.cuda.device(self._device):
            function, _ = self._kernel(name)
            stream, attribute = torch.cuda.current_stream().cuda_stream, _Attribute(_DEPENDENT, 0, 1)
            sizes = (blocks, 1, 1, threads, 1, 1, shared_bytes)
            config = _Config(*sizes, stream, ctypes.addressof(attribute), int(dependent))
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            _ask(f"launch of {name}", "cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)

    def _kernel(self, name: str) -> tuple[ctypes.c_void_p, int]:
        """A kernel, readied for all the dynamic shared memory that a block of it may have; the bytes of that."""
        if name not in self._kernels:
            function, device, least, most = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
            with torch.cuda.device(self._device):
                self._refuse_recording()
                _ask(f"kernel {name}", "cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
                what = f"shared memory of {name}"
                _ask(what, "cuCtxGetDevice", ctypes.byref(device))
                _ask(what, "cuDeviceGetAttribute", ctypes.byref(most), _DEVICE_SHARED, device)
                _ask(what, "cuFuncGetAttribute", ctypes.byref(least), _STATIC_SHARED, function)
                free = most.value - least.value
                _ask(what, "cuFuncSetAttribute", function, _DYNAMIC_SHARED, free)
            self._kernels[name] = function, free
        return self._kernels[name]

    def _refuse_recording(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{self._source.name}: must have run once before it is recorded as a CUDA graph")


def module(name: str | Path, device: torch.device, **defines: int) -> CudaModule | None:
    """The kernels of a source file on a CUDA device, looked for once in a process.

    None where there is no nvcc; and, after one warning for each source, where that is missing, or nvcc cannot be run,
    refuses the source, or builds what the driver cannot load.

    Raises:
        RuntimeError: they have not been looked for before, and the current stream is being recorded.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _module(name, index, tuple(sorted(defines.items())))


_told: set[str | Path] = set()
"""Sources of which a warning has said that there are no kernels."""


@cache
def _module(name: str | Path, index: int, defines: tuple[tuple[str, int], ...]) -> CudaModule | None:
    if nvcc() is None:
        return None
    try:
        return CudaModule(source(name), torch.device("cuda", index), dict(defines))
    except (UserError, OSError) as error:
        if name not in _told:
            _told.add(name)
            why = "\n".join(str(error).splitlines()[:_QUOTED_LINES])
            warnings.warn(f"{why}\nThe Triton kernels are used instead.", RuntimeWarning, stacklevel=3)
        return None
