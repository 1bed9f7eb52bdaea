"""`bitdecoding info`: what is installed, what runs where, and the presets."""

import json
import platform
from importlib.metadata import version
from typing import Annotated, Any

import typer

from bitdecoding import __version__

__all__ = ["info"]

_PACKAGES = ("torch", "transformers", "safetensors", "numpy")
_PYTORCH = "native (FP4 query and probabilities) and w16 (16-bit), both in PyTorch"


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, devices and what runs on them, the presets and the cache folder."""
    content = _collect()
    if as_json:
        print(json.dumps(content, indent=1))
        return
    for name, value in content["versions"].items():
        print(f"{name} {value}")
    print("\nDevices, and the arithmetic that runs there:")
    for device in content["devices"]:
        capability = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
        print(f"  {device['device']} ({device['name']}{capability}): {device['arithmetic']}")
    print(f"\nCache folder: {content['cache_folder']}")
    print("\nPresets (-w16 behind the name of an FP4 preset: the same with w16 arithmetic):")
    width = max(map(len, content["presets"]))
    for name, text in content["presets"].items():
        print(f"  {name:{width}}  {text}")


def _collect() -> dict[str, Any]:
    from bitdecoding.models import cache_folder
    from bitdecoding.recipe import presets

    return {
        "versions": {
            "bitdecoding-fp4": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
        },
        "devices": _devices(),
        "presets": presets(),
        "cache_folder": str(cache_folder()),
    }


def _devices() -> list[dict[str, str | None]]:
    import torch

    name = platform.processor() or platform.machine()
    devices: list[dict[str, str | None]] = [
        {"device": "cpu", "name": name, "compute_capability": None, "arithmetic": _PYTORCH}
    ]
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": torch.cuda.get_device_name(index),
                "compute_capability": ".".join(map(str, capability)),
                "arithmetic": _on_gpu(*capability),
            }
        )
    return devices


def _on_gpu(major: int, minor: int) -> str:
    """What runs on a GPU of this compute capability, and why."""
    from bitdecoding.errors import UnsupportedError
    from bitdecoding.kernels.compile import arch_of_capability, require_compiler
    from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS

    try:
        arch = arch_of_capability(major, minor)
        require_compiler()
    except UnsupportedError as error:
        return f"{_PYTORCH}; {error}"
    dims = ", ".join(map(str, SUPPORTED_HEAD_DIMS))
    return (
        f"kernels for {arch}, w16 and native (FP4 products emulated exactly), for BF16 and FP16 models with head_dim "
        f"{dims}; other models and recipes in PyTorch"
    )
