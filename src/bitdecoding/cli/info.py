"""`bitdecoding info`: what is installed, what runs where, and the presets."""

import json
import platform
from importlib.metadata import version
from typing import Annotated, Any

import typer

from bitdecoding import __version__

__all__ = ["info"]

_PACKAGES = ("torch", "transformers", "safetensors", "numpy")
_ARITHMETIC = "native (FP4 query and probabilities) and w16 (16-bit), both by the PyTorch reference: no GPU kernels yet"


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

    devices = [_device("cpu", platform.processor() or platform.machine(), None)]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        devices.append(_device(f"cuda:{index}", torch.cuda.get_device_name(index), f"{major}.{minor}"))
    return devices


def _device(device: str, name: str, capability: str | None) -> dict[str, str | None]:
    return {"device": device, "name": name, "compute_capability": capability, "arithmetic": _ARITHMETIC}
