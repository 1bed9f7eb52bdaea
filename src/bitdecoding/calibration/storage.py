"""Calibration files: one safetensors file, fp32 tensors, JSON metadata in its header."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bitdecoding.calibration.data import Calibration
from bitdecoding.errors import CalibrationError
from bitdecoding.models import LoadedModel, model_shape
from bitdecoding.numerics.ldlq import LdlqFactors

__all__ = ["FORMAT_VERSION", "check_calibration", "load_calibration", "save_calibration"]

FORMAT_VERSION = 1
_KEY = "bitdecoding_calibration"


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write a calibration; the file appears whole or not at all.

    Tensors (all fp32): ``key_mean``, and where present ``query_second_moment``, ``query_mean``, ``ldlq_c``, ``ldlq_d``.
    """
    path = Path(path)
    tensors = {"key_mean": calibration.key_mean}
    if calibration.query_second_moment is not None:
        tensors["query_second_moment"] = calibration.query_second_moment
    if calibration.query_mean is not None:
        tensors["query_mean"] = calibration.query_mean
    if calibration.ldlq is not None:
        tensors["ldlq_c"], tensors["ldlq_d"] = calibration.ldlq
    header = {
        "format_version": FORMAT_VERSION,
        "dtype": "float32",
        "tau": calibration.tau,
        "ldlq_damping": calibration.ldlq_damping,
        **calibration.metadata,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({k: v.float().cpu().contiguous() for k, v in tensors.items()}, temporary, {_KEY: json.dumps(header)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration file.

    Raises:
        CalibrationError: missing, truncated or damaged file, one that is no calibration or of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise CalibrationError(f"calibration: no file {path}; run `bitdecoding calibrate MODEL -o {path}`")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise CalibrationError(f"calibration: {path} is damaged ({error}); calibrate again") from None
    if not isinstance(header, dict) or "key_mean" not in tensors:
        raise CalibrationError(f"calibration: {path} is a safetensors file but not a calibration of this library")
    if header.get("format_version") != FORMAT_VERSION:
        raise CalibrationError(
            f"calibration: {path} has format {header.get('format_version')}, this version reads {FORMAT_VERSION}"
        )
    return _from_parts(path, header, tensors)


def _from_parts(path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Calibration:
    known = {"format_version", "dtype", "tau", "ldlq_damping"}
    key_mean = tensors["key_mean"]
    if key_mean.dim() != 3 or not all(bool(torch.isfinite(t).all()) for t in tensors.values()):
        raise CalibrationError(f"calibration: {path} holds tensors of a wrong shape, NaN or Inf; calibrate again")
    ldlq = LdlqFactors(tensors["ldlq_c"], tensors["ldlq_d"]) if "ldlq_c" in tensors and "ldlq_d" in tensors else None
    return Calibration(
        key_mean=key_mean,
        query_second_moment=tensors.get("query_second_moment"),
        query_mean=tensors.get("query_mean"),
        tau=header.get("tau"),
        ldlq=ldlq,
        ldlq_damping=header.get("ldlq_damping", 0.0),
        metadata={k: v for k, v in header.items() if k not in known},
    )


def check_calibration(
    calibration: Calibration, loaded: LoadedModel, *, window: int | None = None, allow_mismatch: bool = False
) -> None:
    """Refuse a calibration of another model, revision, shape or (where given) window.

    Args:
        calibration: as loaded.
        loaded: the model that it shall serve.
        window: the window it must have been made with, or None for any.
        allow_mismatch: accept another model, revision or window; never another shape.

    Raises:
        CalibrationError: with both sides and what to do.
    """
    shape = model_shape(loaded.model.config)
    expected = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
    if tuple(calibration.key_mean.shape) != expected:
        raise CalibrationError(
            f"calibration: made for (layers, KV heads, head_dim) {tuple(calibration.key_mean.shape)}, "
            f"{loaded.model_id} has {expected}; calibrate this model"
        )
    if allow_mismatch:
        return
    for field, actual in (("model_id", loaded.model_id), ("revision", loaded.revision), ("window", window)):
        made_for = calibration.metadata.get(field)
        if actual is not None and made_for != actual:
            raise CalibrationError(
                f"calibration: made for {field} {made_for}, this is {actual}; calibrate again or allow the mismatch "
                f"explicitly (allow_mismatch=True, --allow-mismatch)"
            )
