"""CUDA sources are found, built once, kept on disk; what is wrong with compiler, source or cache is said."""

from __future__ import annotations

import ctypes
import re
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_essh.errors import UserError
from megatron_essh.ops import cuda_module
from megatron_essh.ops.cuda_module import CudaModule, build, built, module, nvcc, source

ROOT = Path(__file__).resolve().parents[2]
CAPABILITY = (9, 0)
DEVICE = torch.device("cuda", 0)
KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }\n'
has_nvcc = pytest.mark.skipif(nvcc() is None, reason="needs nvcc")


FOUND = (cuda_module.nvcc, cuda_module._version, cuda_module._driver, cuda_module._module)


def forget() -> None:
    for found in FOUND:
        found.cache_clear()
    cuda_module._told.clear()


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What was found out about compilers and kernels is of one test."""
    forget()
    yield
    forget()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ESSH_CACHE", str(folder))
    return folder


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a compiler in $CUDA_HOME that writes the source's length, and its flags to a log every time it builds."""

    def make(version: str = "13.0", status: int = 0) -> Path:
        program = tmp_path / "toolkit" / "bin" / "nvcc"
        program.parent.mkdir(parents=True, exist_ok=True)
        log = tmp_path / "builds.txt"
        log.touch()
        program.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo {version}; exit 0; fi\n'
            f'echo "$@" >> {log}\n'
            f'if [ {status} != 0 ]; then echo "on stdout"; echo "on stderr" >&2; exit {status}; fi\n'
            'for word in "$@"; do case "$word" in *.cu) from="$word";; esac; to="$word"; done\n'
            'wc -c < "$from" > "$to"\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
        forget()
        return log

    return make


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cu"
    path.write_text(KERNEL)
    return path


def builds(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_a_source_is_found_in_a_checkout_and_beside_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source("decode_products.cu") == ROOT / "csrc" / "decode_products.cu"
    checkout, installed = tmp_path / "csrc", tmp_path / "package" / "csrc"
    monkeypatch.setattr(cuda_module, "SOURCES", (checkout, installed))
    with pytest.raises(UserError) as missing:
        source("decode_products.cu")
    assert str(checkout / "decode_products.cu") in str(missing.value)
    assert str(installed / "decode_products.cu") in str(missing.value)
    for folder in (installed, checkout):
        folder.mkdir(parents=True)
        (folder / "decode_products.cu").touch()
        assert source("decode_products.cu") == folder / "decode_products.cu"


def test_setup_puts_every_cuda_source_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools")
    pytest.importorskip("pybind11")
    import runpy

    import setuptools
    from setuptools.dist import Distribution

    given: dict[str, object] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path("setup.py")
    command_class = given["cmdclass"]["build_py"]  # type: ignore[index]
    command = command_class(Distribution({"packages": []}))
    command.ensure_finalized()
    command.build_lib = str(tmp_path)
    command.run()
    sources = sorted(path.name for path in (ROOT / "csrc").glob("*.cu"))
    assert sources
    installed = tmp_path / cuda_module.SOURCES[1].relative_to(ROOT)
    assert sorted(path.name for path in installed.iterdir()) == sources
    for name in sources:
        assert (installed / name).read_bytes() == (ROOT / "csrc" / name).read_bytes()
        assert f"csrc/{name}" in command.get_source_files()
        assert str(installed / name) in command.get_outputs()


def test_without_a_compiler_a_build_says_what_to_do(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "nvcc", lambda: None)
    with pytest.raises(UserError, match=r"kernel\.cu: no nvcc to build it; put it on the PATH, or set CUDA_HOME"):
        build(kernel, CAPABILITY, {})


def test_a_compiler_that_cannot_be_run_is_named(kernel: Path, fake_compiler: Callable[..., Path], cache: Path) -> None:
    fake_compiler()
    program = nvcc()
    assert program is not None
    program.write_text("no program")
    with pytest.raises(UserError, match=r"bin/nvcc: cannot be run \(.*\); set CUDA_HOME"):
        build(kernel, CAPABILITY, {})
    with pytest.raises(UserError, match="cannot be run"):
        built(kernel, CAPABILITY, {})


def test_what_a_compiler_says_on_either_stream_is_told(kernel: Path, fake_compiler: Callable[..., Path]) -> None:
    fake_compiler(status=2)
    with pytest.raises(UserError) as refused:
        build(kernel, CAPABILITY, {})
    for part in (str(kernel), "sm_90", "on stdout", "on stderr"):
        assert part in str(refused.value)


def test_a_compiler_that_says_it_is_done_and_built_nothing_is_told(
    kernel: Path, fake_compiler: Callable[..., Path]
) -> None:
    fake_compiler()
    program = nvcc()
    assert program is not None
    program.write_text("#!/bin/sh\n")
    with pytest.raises(UserError, match=r"bin/nvcc could not build it for sm_90"):
        build(kernel, CAPABILITY, {})


def test_the_toolkit_that_is_named_comes_before_that_on_the_path(
    fake_compiler: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler()
    assert nvcc() == tmp_path / "toolkit" / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    nvcc.cache_clear()
    assert nvcc() == tmp_path / "toolkit" / "bin" / "nvcc"


def test_a_source_is_compiled_once_for_each_capability_compiler_flags_and_text(
    kernel: Path, fake_compiler: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_compiler()
    first = built(kernel, CAPABILITY, {})
    assert built(kernel, CAPABILITY, {}) == first == f"{len(KERNEL)}\n".encode()
    assert builds(log) == 1
    built(kernel, (10, 0), {})
    assert builds(log) == 2
    kernel.write_text(KERNEL + "// more\n")
    assert built(kernel, CAPABILITY, {}) != first
    assert builds(log) == 3
    fake_compiler(version="13.1")
    built(kernel, CAPABILITY, {})
    assert builds(log) == 4
    fake_compiler()
    built(kernel, CAPABILITY, {})
    assert builds(log) == 4
    for number, variable in enumerate(cuda_module.OTHER_FLAGS):
        monkeypatch.setenv(variable, "-G")
        built(kernel, CAPABILITY, {})
        assert builds(log) == 5 + number
    assert len(list(cache.iterdir())) == 6


def test_defines_are_given_to_the_compiler_and_make_another_entry(
    kernel: Path, fake_compiler: Callable[..., Path], cache: Path
) -> None:
    log = fake_compiler()
    built(kernel, CAPABILITY, {})
    built(kernel, CAPABILITY, {"ROWS": 8, "WARPS": 4})
    built(kernel, CAPABILITY, {"WARPS": 4, "ROWS": 8})
    built(kernel, CAPABILITY, {"ROWS": 4, "WARPS": 8})
    assert [[word for word in line.split() if word.startswith("-D")] for line in log.read_text().splitlines()] == [
        [],
        ["-DROWS=8", "-DWARPS=4"],
        ["-DROWS=4", "-DWARPS=8"],
    ]
    names = [entry.name for entry in cache.iterdir()]
    assert len(names) == 3
    assert all(re.fullmatch(r"kernel-[0-9a-f]{32}\.cubin", name) for name in names)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b"x" + b[1:], lambda b: b + b"\0"])
def test_a_damaged_entry_is_built_again(
    kernel: Path, fake_compiler: Callable[..., Path], cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    log = fake_compiler()
    first = built(kernel, CAPABILITY, {})
    (entry,) = cache.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(damage(sound))
    with pytest.warns(RuntimeWarning, match="damaged; building it again"):
        assert built(kernel, CAPABILITY, {}) == first
    assert builds(log) == 2
    assert entry.read_bytes() == sound
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert built(kernel, CAPABILITY, {}) == first
    assert builds(log) == 2


@pytest.mark.parametrize("place", ["a file", "below a file", "an entry is a folder"])
def test_a_cache_that_cannot_be_used_costs_a_warning_and_a_build(
    kernel: Path,
    fake_compiler: Callable[..., Path],
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    log = fake_compiler()
    expected = build(kernel, CAPABILITY, {})
    if place == "an entry is a folder":
        built(kernel, CAPABILITY, {})
        (entry,) = cache.iterdir()
        entry.unlink()
        entry.mkdir()
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("ESSH_CACHE", str(tmp_path / "file" / ("below" if place == "below a file" else "")))
    count = builds(log)
    with pytest.warns(RuntimeWarning) as caught:
        assert built(kernel, CAPABILITY, {}) == expected
    assert re.search(r"kernel cache: .*cannot be written .*; every process builds", str(caught[-1].message))
    assert builds(log) == count + 1


def test_without_a_home_directory_every_process_builds(
    kernel: Path, fake_compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_compiler()
    monkeypatch.delenv("ESSH_CACHE", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(RuntimeWarning, match=r"no home directory .*; set \$ESSH_CACHE"):
        built(kernel, CAPABILITY, {})
    assert builds(log) == 1


class Driver:
    """A driver's answers, and what it was asked; `refuses` names the function that fails."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.calls: list[str] = []
        self.dynamic_shared: list[int] = []
        self.launches: list[dict[str, int]] = []

    def __getattr__(self, function: str) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            self.calls.append(function)
            if function == self.refuses:
                return 209
            if function == "cuDeviceGetAttribute":
                arguments[0]._obj.value = 232448
            elif function == "cuFuncGetAttribute":
                arguments[0]._obj.value = 1024
            elif function == "cuFuncSetAttribute":
                self.dynamic_shared.append(arguments[2])
            elif function == "cuGetErrorString":
                arguments[1]._obj.value = b"no binary for this GPU"
            elif function == "cuLaunchKernelEx":
                config = arguments[0]._obj
                launch = {name: getattr(config, name) for name, _ in config._fields_}
                attribute = cuda_module._Attribute.from_address(launch.pop("attributes"))
                place = ctypes.cast(arguments[2][0], ctypes.POINTER(ctypes.c_int))
                self.launches.append(launch | {"id": attribute.id, "value": attribute.value, "parameter": place[0]})
            return 0

        return answer


class Number(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int),)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Callable[..., Driver]:
    """Stands in for a GPU, its driver and torch's face of them."""

    def make(refuses: str = "", recording: bool = False) -> Driver:
        driver = Driver(refuses)
        monkeypatch.setattr(cuda_module, "_driver", lambda: driver)
        for name, given in (
            ("device", lambda device: warnings.catch_warnings()),  # some context that does nothing
            ("synchronize", lambda: None),
            ("current_device", lambda: 0),
            ("current_stream", lambda: SimpleNamespace(cuda_stream=77)),
            ("get_device_capability", lambda device: CAPABILITY),
            ("is_current_stream_capturing", lambda: recording),
        ):
            monkeypatch.setattr(torch.cuda, name, given)
        return driver

    return make


def test_a_launch_is_what_was_asked_for(
    kernel: Path, fake_compiler: Callable[..., Path], gpu: Callable[..., Driver]
) -> None:
    fake_compiler()
    driver = gpu()
    kernels = CudaModule(kernel, DEVICE, {})
    assert kernels.shared_bytes("twice") == 232448 - 1024
    for dependent in (False, True):
        kernels.launch("twice", 12, 96, 2048, Number(5), dependent=dependent)
    sizes = {f"{of}_{axis}": 1 for of in ("grid", "block") for axis in "yz"}
    sizes |= {"grid_x": 12, "block_x": 96, "shared_bytes": 2048, "stream": 77, "parameter": 5}
    assert driver.launches == [sizes | {"attribute_count": count, "id": 6, "value": 1} for count in (0, 1)]
    assert driver.dynamic_shared == [232448 - 1024]
    assert driver.calls.count("cuModuleGetFunction") == driver.calls.count("cuModuleLoadData") == 1


@pytest.mark.parametrize("function", ["cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx"])
def test_what_the_driver_refuses_is_told(
    function: str, kernel: Path, fake_compiler: Callable[..., Path], gpu: Callable[..., Driver]
) -> None:
    fake_compiler()
    gpu(refuses=function)
    kernels = CudaModule(kernel, DEVICE, {})
    with pytest.raises(RuntimeError, match=r"twice: no binary for this GPU \(209\)"):
        kernels.launch("twice", 1, 32, 0, Number(5), dependent=False)


def test_what_has_not_run_cannot_be_recorded(
    kernel: Path, fake_compiler: Callable[..., Path], gpu: Callable[..., Driver]
) -> None:
    log = fake_compiler()
    gpu(recording=True)
    refused = r"kernel\.cu: must have run once before it is recorded"
    for make in (lambda: CudaModule(kernel, DEVICE, {}), lambda: module(kernel, DEVICE)):
        with pytest.raises(RuntimeError, match=refused):
            make()
    assert builds(log) == 0
    gpu()
    kernels = module(kernel, DEVICE)  # it was not taken for one that cannot be built
    assert kernels is not None
    kernels.launch("twice", 1, 32, 0, Number(5), dependent=True)
    driver = gpu(recording=True)
    assert module(kernel, DEVICE) is kernels
    kernels.launch("twice", 1, 32, 0, Number(6), dependent=True)
    assert [launch["parameter"] for launch in driver.launches] == [6]
    with pytest.raises(RuntimeError, match=refused):
        kernels.launch("thrice", 1, 32, 0, Number(7), dependent=True)


def test_kernels_are_loaded_once_for_each_device_and_defines(
    kernel: Path, fake_compiler: Callable[..., Path], gpu: Callable[..., Driver]
) -> None:
    log = fake_compiler()
    driver = gpu()
    first = module(kernel, DEVICE, ROWS=8, WARPS=4)
    assert first is not None
    assert module(kernel, torch.device("cuda"), WARPS=4, ROWS=8) is first
    assert len({first, module(kernel, DEVICE), module(kernel, torch.device("cuda", 1), ROWS=8, WARPS=4)}) == 3
    assert driver.calls.count("cuModuleLoadData") == 3
    assert builds(log) == 2


def test_without_a_compiler_there_are_no_kernels_and_nothing_is_said(
    kernel: Path, gpu: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu()
    monkeypatch.setattr(cuda_module, "nvcc", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module(kernel, DEVICE, ROWS=8) is None


@pytest.mark.parametrize(
    "failure", ["refuses the source", "cannot be run", "is not what the driver knows", "has no place", "has no source"]
)
def test_a_toolkit_that_does_not_work_costs_one_warning(
    kernel: Path,
    fake_compiler: Callable[..., Path],
    gpu: Callable[..., Driver],
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_compiler(status=2 if failure == "refuses the source" else 0)
    gpu(refuses="cuModuleLoadData" if failure == "is not what the driver knows" else "")
    program = nvcc()
    assert program is not None
    if failure == "cannot be run":
        program.write_text("no program")
    if failure == "has no source":
        kernel.unlink()
    if failure == "has no place":
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (8, 8, 16):
            assert module(kernel, DEVICE, ROWS=rows) is None
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__
    expected = {
        "refuses the source": r"could not build it for sm_90:\non stdout\n(\n)?on stderr\n",
        "cannot be run": r"bin/nvcc: cannot be run \(.*\); set CUDA_HOME",
        "is not what the driver knows": r"kernel\.cu, built by .*bin/nvcc: .*cannot load it: no binary for this GPU",
        "has no place": "No such file or directory: '/nowhere/at/all",
        "has no source": "kernel.cu is there; install the package anew",
    }[failure]
    assert re.search(expected, str(warning.message))
    assert str(warning.message).endswith("\nThe Triton kernels are used instead.")


def test_of_what_a_compiler_says_only_the_first_lines_are_in_the_warning(
    kernel: Path, fake_compiler: Callable[..., Path], gpu: Callable[..., Driver]
) -> None:
    fake_compiler()
    gpu()
    program = nvcc()
    assert program is not None
    program.write_text("#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do echo line $i; done\nexit 1\n")
    with pytest.warns(RuntimeWarning, match=r"line 1\nline 2\nline 3\nline 4\nline 5\nThe Triton kernels"):
        module(kernel, DEVICE)


@has_nvcc
def test_nvcc_builds_a_kernel_and_is_quoted_where_it_does_not(kernel: Path, tmp_path: Path) -> None:
    assert build(kernel, CAPABILITY, {}).startswith(b"\x7fELF")
    bad = tmp_path / "bad.cu"
    bad.write_text(KERNEL.replace("threadIdx", "nowhere"))
    with pytest.raises(UserError) as refused:
        build(bad, CAPABILITY, {})
    for part in (str(bad), "could not build it for sm_90", '"nowhere" is undefined'):
        assert part in str(refused.value)
    with pytest.raises(UserError, match=r"could not build it for sm_50:\n.*[Uu]nsupported gpu arch"):
        build(kernel, (5, 0), {})


@has_nvcc
def test_the_drivers_structures_and_numbers_are_those_of_its_header(tmp_path: Path) -> None:
    config, attribute = cuda_module._Config, cuda_module._Attribute
    expected = {
        "sizeof(CUlaunchConfig)": ctypes.sizeof(config),
        "offsetof(CUlaunchConfig, gridDimX)": config.grid_x.offset,
        "offsetof(CUlaunchConfig, gridDimZ)": config.grid_z.offset,
        "offsetof(CUlaunchConfig, blockDimX)": config.block_x.offset,
        "offsetof(CUlaunchConfig, blockDimZ)": config.block_z.offset,
        "offsetof(CUlaunchConfig, sharedMemBytes)": config.shared_bytes.offset,
        "offsetof(CUlaunchConfig, hStream)": config.stream.offset,
        "offsetof(CUlaunchConfig, attrs)": config.attributes.offset,
        "offsetof(CUlaunchConfig, numAttrs)": config.attribute_count.offset,
        "sizeof(CUlaunchAttribute)": ctypes.sizeof(attribute),
        "offsetof(CUlaunchAttribute, id)": attribute.id.offset,
        "offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed)": attribute.value.offset,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": cuda_module._DEPENDENT,
        "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": cuda_module._STATIC_SHARED,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": cuda_module._DYNAMIC_SHARED,
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": cuda_module._DEVICE_SHARED,
    }
    path = tmp_path / "header.cu"
    claims = [f'static_assert({what} == N{i}, "claim {i}");' for i, what in enumerate(expected)]
    path.write_text("\n".join(["#include <cstddef>", "#include <cuda.h>", *claims]))
    defines = {f"N{i}": value for i, value in enumerate(expected.values())}
    build(path, CAPABILITY, defines)
    with pytest.raises(UserError, match=r'static assertion failed .*"?claim 8"?'):
        build(path, CAPABILITY, defines | {"N8": defines["N8"] + 4})


@pytest.mark.gpu
@has_nvcc
@pytest.mark.parametrize("dependent", [False, True])
def test_kernels_run_on_the_current_stream_and_in_a_graph(tmp_path: Path, cache: Path, dependent: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if dependent and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("dependent launches need compute capability 9.0")
    path = tmp_path / "advance.cu"
    path.write_text(
        "struct Params { float* x; int n; };\n"
        'extern "C" __global__ void advance(const __grid_constant__ Params p) {\n'
        "  __shared__ float factor[100];\n"
        "  extern __shared__ float place[];\n"
        "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  factor[threadIdx.x] = FACTOR;\n"
        "  place[threadIdx.x] = i;\n"
        "  __syncthreads();\n"
        "#if __CUDA_ARCH__ >= 900\n"
        '  asm volatile("griddepcontrol.wait;" ::: "memory");\n'
        "#endif\n"
        "  if (i < p.n) p.x[i] = factor[threadIdx.x] * p.x[i] + place[threadIdx.x];\n"
        "}\n"
    )

    class Params(ctypes.Structure):
        _fields_ = (("x", ctypes.c_uint64), ("n", ctypes.c_int32))

    n = 100
    x, places = torch.ones(n, device=device), torch.arange(n, device=device).float()
    kernels = module(path, device, FACTOR=3)
    assert kernels is not None
    most = kernels.shared_bytes("advance")
    assert most >= 32 * 1024

    def advance(times: int) -> None:
        for _ in range(times):
            kernels.launch("advance", 4, 32, most, Params(x.data_ptr(), n), dependent=dependent)

    def advanced(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = 3 * x + places
        return x

    expected = advanced(x, 4)
    advance(4)
    assert torch.equal(x, expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        advance(2)
    torch.cuda.current_stream().wait_stream(stream)
    expected = advanced(expected, 2)
    assert torch.equal(x, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance(3)
        assert module(path, device, FACTOR=3) is kernels
        with pytest.raises(RuntimeError, match=r"advance\.cu: must have run once before it is recorded"):
            module(path, device, FACTOR=5)
    assert torch.equal(x, expected)
    x.fill_(1.0)
    expected = advanced(torch.ones_like(x), 6)
    for _ in range(2):
        graph.replay()
    assert torch.equal(x, expected)

    with pytest.raises(RuntimeError, match="kernel nothing: "):
        kernels.launch("nothing", 1, 32, 0, Params(x.data_ptr(), n), dependent=dependent)
    with pytest.raises(RuntimeError, match="launch of advance: "):
        kernels.launch("advance", 1, 32, most + 1, Params(x.data_ptr(), n), dependent=dependent)
