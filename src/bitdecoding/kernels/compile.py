"""Compilation of the CUDA sources at first use, kept on disk, and launches on torch's current stream.

Sources lie in ``csrc`` and include no CUDA headers, so that NVRTC's wheel is all that compiling needs: neither a
toolkit nor a driver. Needs the ``cuda`` extra.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitdecoding.errors import BitDecodingError, InvalidInputError, UnsupportedError
from bitdecoding.kernels.layout import ArchFamily
from bitdecoding.models import cache_folder

__all__ = [
    "ARCHS",
    "CompilationError",
    "CompiledKernel",
    "Kernel",
    "KernelResources",
    "arch_of_capability",
    "compile_kernel",
    "kernel_cache_folder",
    "require_compiler",
    "require_cuda",
]

ARCHS = ("sm_90a", "sm_120a", "sm_121a")
"""Architectures that the sources are written for."""

_CACHE_VERSION = 1
_DEFAULT_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a kernel may ask for without more ado."""
_OPTIONS: Mapping[str, Any] = {"std": "c++17", "ptxas_options": ["-v"]}


class CompilationError(BitDecodingError, RuntimeError):
    """NVRTC refused a source of ours; the message holds its log."""


@dataclass(frozen=True)
class KernelResources:
    """What ptxas says that a kernel takes, per thread; spills in bytes."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled source.

    Attributes:
        arch: what it was compiled for.
        cubin: machine code.
        resources: of each kernel, by its name in the cubin.
    """

    arch: str
    cubin: bytes
    resources: Mapping[str, KernelResources]


def kernel_cache_folder() -> Path:
    """Where compiled kernels are kept: ``kernels`` in the library's cache folder."""
    return cache_folder() / "kernels"


def arch_of_capability(major: int, minor: int) -> str:
    """What to compile for on a device of this compute capability; raises `UnsupportedError` where no kernels run."""
    ArchFamily.of_capability(major, minor)
    arch = f"sm_{major}{minor}a"
    if arch not in ARCHS:
        raise UnsupportedError(f"device: no kernels for compute capability {major}.{minor} ({', '.join(ARCHS)} exist)")
    return arch


def compile_kernel(source: str, arch: str, defines: Mapping[str, int] | None = None) -> CompiledKernel:
    """Compile a file of ``csrc``, or take the result from disk.

    The cache key covers the text of the source and of all headers, options, architecture and NVRTC's version. An entry
    that does not match its own checksum is compiled again. A folder that cannot be written to only costs the time.

    Args:
        source: file name, such as "dequantize.cu".
        arch: one of `ARCHS`.
        defines: macros.

    Raises:
        InvalidInputError: no such source.
        UnsupportedError: another architecture, or one that the installed NVRTC does not know; the ``cuda`` extra is
            missing.
        CompilationError: NVRTC's errors.
    """
    texts = _sources()
    if not source.endswith(".cu") or source not in texts:
        known = ", ".join(sorted(name for name in texts if name.endswith(".cu")))
        raise InvalidInputError(f"source: {source!r} is unknown; use one of {known}")
    return _compile_text(source, texts[source], arch, defines or {})


def _compile_text(name: str, text: str, arch: str, defines: Mapping[str, int]) -> CompiledKernel:
    """`compile_kernel` for a text that may include the headers of ``csrc``."""
    if arch not in ARCHS:
        raise UnsupportedError(f"arch: {arch!r} is not supported; use one of {', '.join(ARCHS)}")
    headers = {name: content for name, content in _sources().items() if name.endswith(".cuh")}
    version = _nvrtc_version()
    key = [_CACHE_VERSION, name, text, headers, arch, dict(defines), dict(_OPTIONS), version]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    entry = kernel_cache_folder() / f"{Path(name).stem}-{arch}-{digest[:32]}.bin"
    compiled = _load(entry, arch)
    if compiled is None:
        compiled = _run_nvrtc(name, text, arch, defines)
        with suppress(OSError):
            _store(entry, compiled)
    return compiled


@cache
def _sources() -> Mapping[str, str]:
    return {file.name: file.read_text("utf-8") for file in files("bitdecoding.kernels").joinpath("csrc").iterdir()}


# --- NVRTC


def _cuda_core() -> Any:
    try:
        from cuda import core
    except ImportError as error:
        raise UnsupportedError(
            f"kernels: cuda-core is not installed ({error}); install 'bitdecoding-fp4[cuda]'"
        ) from error
    return core


@cache
def _nvrtc_version() -> tuple[int, int]:
    _cuda_core()
    from cuda.bindings import nvrtc

    try:
        status, major, minor = nvrtc.nvrtcVersion()
    # The library is looked for at the first call, and reported missing by an error of cuda-pathfinder
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise UnsupportedError(
            f"kernels: NVRTC was not found ({first_line}); install 'bitdecoding-fp4[cuda]'"
        ) from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise UnsupportedError(f"kernels: NVRTC does not work ({status.name})")
    return major, minor


def _run_nvrtc(name: str, text: str, arch: str, defines: Mapping[str, int]) -> CompiledKernel:
    core = _cuda_core()
    log = StringIO()
    with tempfile.TemporaryDirectory() as folder:
        # Written out, because the package may lie in a zip file
        for header, content in _sources().items():
            if header.endswith(".cuh"):
                Path(folder, header).write_text(content, "utf-8")
        options = core.ProgramOptions(
            name=name,
            arch=arch,
            include_path=folder,
            define_macro=[(macro, str(value)) for macro, value in defines.items()] or None,
            **_OPTIONS,
        )
        try:
            code = core.Program(text, "c++", options).compile("cubin", logs=log)
        except Exception as error:  # cuda-core's error types are not public
            message = str(error)
            if "--gpu-architecture" in message:
                version = ".".join(map(str, _nvrtc_version()))
                raise UnsupportedError(
                    f"arch: NVRTC {version} cannot compile for {arch}; install a newer one"
                ) from error
            raise CompilationError(f"{name} for {arch}: {message.strip()}") from error
    return CompiledKernel(arch, bytes(code.code), _parse_resources(log.getvalue()))


_FUNCTION = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def _parse_resources(log: str) -> dict[str, KernelResources]:
    """Resources by kernel from ptxas' verbose log."""
    resources = {}
    parts = _FUNCTION.split(log)[1:]
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        stack, registers = _STACK.search(part), _REGISTERS.search(part)
        if stack and registers:
            resources[name] = KernelResources(int(registers[1]), *map(int, stack.groups()))
    return resources


# --- Disk cache: an entry is the SHA-256 of all behind it (32 bytes), a line of JSON, and the cubin


def _load(entry: Path, arch: str) -> CompiledKernel | None:
    try:
        content = entry.read_bytes()
    except OSError:
        return None
    digest, payload = content[:32], content[32:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    line, _, cubin = payload.partition(b"\n")
    resources = {name: KernelResources(**values) for name, values in json.loads(line).items()}
    return CompiledKernel(arch, cubin, resources)


def _store(entry: Path, compiled: CompiledKernel) -> None:
    resources = {name: vars(values) for name, values in compiled.resources.items()}
    payload = json.dumps(resources).encode() + b"\n" + compiled.cubin
    entry.parent.mkdir(parents=True, exist_ok=True)
    # Moved into place, so that no other process reads half of it
    handle, partial = tempfile.mkstemp(dir=entry.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        os.replace(partial, entry)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise


# --- Launch


def require_cuda(device: torch.device) -> None:
    """Raise `UnsupportedError` unless this is a CUDA device."""
    if device.type != "cuda":
        raise UnsupportedError(f"device: kernels run on CUDA devices, got {str(device)!r}")


def require_compiler() -> None:
    """Raise `UnsupportedError` unless kernels can be compiled: cuda-core and NVRTC are installed."""
    _nvrtc_version()


class _TorchStream:
    """A torch stream as cuda-core takes foreign streams."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Kernel:
    """One kernel of a source, compiled and loaded when it is first launched on a device.

    Args:
        source: file of ``csrc``.
        name: the kernel's name in it (``extern "C"``).
        defines: macros.
        shared_bytes: dynamic shared memory of a CTA.
    """

    def __init__(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int = 0) -> None:
        self._source = source
        self._name = name
        self._defines = dict(defines)
        self._shared_bytes = shared_bytes
        self._loaded: dict[int, Any] = {}

    def launch(
        self,
        device: torch.device,
        grid: Sequence[int],
        threads: int,
        *arguments: torch.Tensor | np.generic | None,
    ) -> None:
        """Launch on torch's current stream of a CUDA device.

        Args:
            device: where all tensors live.
            grid: CTAs, up to three dims; nothing is launched when one is 0.
            threads: threads a CTA.
            arguments: in the kernel's order: tensors as pointers, None as a null pointer, NumPy scalars of the
                parameter's type.

        Raises:
            UnsupportedError: not a CUDA device, or one without kernels.
            InvalidInputError: a tensor on another device.
        """
        require_cuda(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.device != torch.device("cuda", index):
                raise InvalidInputError(f"arguments: a tensor is on {argument.device}, the kernel runs on cuda:{index}")
        if 0 in grid:
            return
        core = _cuda_core()
        with torch.cuda.device(index):
            kernel = self._load(index)
            core.launch(
                _TorchStream(torch.cuda.current_stream(index)),
                core.LaunchConfig(grid=tuple(grid), block=threads, shmem_size=self._shared_bytes),
                kernel,
                *(_launch_argument(argument) for argument in arguments),
            )

    def _load(self, index: int) -> Any:
        """The kernel on a device that is the current one."""
        if index not in self._loaded:
            core = _cuda_core()
            core.Device(index).set_current()  # cuda-core's own record of the current context, which torch has set
            compiled = compile_kernel(
                self._source, arch_of_capability(*torch.cuda.get_device_capability(index)), self._defines
            )
            kernel = core.ObjectCode.from_cubin(compiled.cubin, name=self._source).get_kernel(self._name)
            if self._shared_bytes > _DEFAULT_SHARED_BYTES:
                _allow_shared_bytes(kernel, self._shared_bytes, index)
            self._loaded[index] = kernel
        return self._loaded[index]


def _allow_shared_bytes(kernel: Any, shared_bytes: int, index: int) -> None:
    """Raise a kernel's limit of dynamic shared memory on a device; cuda-core has no setter for it."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(
        attribute, shared_bytes, driver.CUkernel(int(kernel.handle)), driver.CUdevice(index)
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(f"device: a kernel needs {shared_bytes} bytes of shared memory a CTA ({status.name})")


def _launch_argument(argument: torch.Tensor | np.generic | None) -> int | np.generic:
    """cuda-core passes a Python int as a pointer."""
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
