"""CUDA kernels built for the CPU, so that their logic is tested where there is no GPU (see cuda_host/ptx.cuh)."""

import atexit
import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import bitdecoding.kernels

CSRC = Path(bitdecoding.kernels.__file__).parent / "csrc"
SHIM = Path(__file__).parent / "cuda_host" / "ptx.cuh"

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="host-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _build(source: str, name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    key = hashlib.sha256(repr((source, name, defines)).encode()).hexdigest()[:16]
    folder = _folder() / key
    shutil.copytree(CSRC, folder)
    additions = SHIM.with_name(f"{Path(source).stem}_ptx.cuh")
    (folder / "ptx.cuh").write_text(SHIM.read_text() + (additions.read_text() if additions.exists() else ""))
    unit = folder / "host.cpp"
    dynamic = "uint8_t* const shared = reinterpret_cast<uint8_t*>(host::dynamic_shared);"
    text = re.sub(r"extern __shared__ .*? uint8_t shared\[\];", dynamic, (folder / source).read_text())
    unit.write_text(
        f"{text}\n"
        'extern "C" const char* host_launch(const int* grid, int threads, unsigned seed, void** arguments) {\n'
        f"    return host::launch({name}, grid, threads, seed, arguments);\n"
        "}\n"
    )
    library = folder / "kernel.so"
    macros = [f"-D{macro}={value}" for macro, value in defines]
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
    # Each library has its own variables; jumps from stack to stack are meant
    options += ["-fno-gnu-unique", "-U_FORTIFY_SOURCE"]
    command = ["g++", *options, *macros, str(unit), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    loaded = ctypes.CDLL(str(library))
    loaded.host_launch.restype = ctypes.c_char_p
    return loaded


class HostKernel:
    """Takes the place of `bitdecoding.kernels.compile.Kernel` for tensors on the CPU."""

    def __init__(self, source: str, name: str, defines: Mapping[str, int], *, threads: int | None = None) -> None:
        self._library = _build(source, name, tuple(sorted(defines.items())))
        self.threads = threads
        self.seed = 0

    def launch(
        self,
        device: torch.device,
        grid: Sequence[int],
        threads: int,
        *arguments: torch.Tensor | np.generic | None,
    ) -> None:
        if 0 in grid:
            return
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        dims = (ctypes.c_int * 3)(*grid, *[1] * (3 - len(grid)))
        failure = self._library.host_launch(dims, self.threads or threads, ctypes.c_uint(self.seed), pointers)
        if failure is not None:
            raise RuntimeError(failure.decode())


def _value(argument: torch.Tensor | np.generic | None) -> np.ndarray:
    if argument is None:
        return np.zeros(1, dtype=np.uint64)
    if isinstance(argument, torch.Tensor):
        return np.array([argument.data_ptr()], dtype=np.uint64)
    return np.array([argument])
