"""4-bit (NVFP4 and MXFP4) KV cache for LLM decoding: exact numerics, recipes, reference attention and calibration.

The names below are the public API. Each is imported when it is first used, so that ``import bitdecoding`` stays cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULE_OF = {
    # numerics: one function a rule
    "quantize_blocks": "numerics",
    "dequantize_blocks": "numerics",
    "quantize_blocks_ldlq": "numerics",
    "ldlq_factors": "numerics",
    "pack_nibbles": "numerics",
    "unpack_nibbles": "numerics",
    "hadamard_transform": "numerics",
    "dual_residual_query": "numerics",
    "quantize_probabilities": "numerics",
    # recipes
    "Recipe": "recipe",
    "get_recipe": "recipe",
    "presets": "recipe",
    # reference attention
    "LayerCodec": "cache.codec",
    "build_sequence": "reference",
    "attention_step": "reference",
    "decode_step_reference": "reference",
    "mla_decode_step": "reference",
    "exact_attention": "reference",
    # models, calibration, caches
    "load_model": "models",
    "Calibration": "calibration",
    "LayerCalibration": "calibration",
    "calibrate": "calibration.compute",
    "load_calibration": "calibration.storage",
    "save_calibration": "calibration.storage",
    "PagedFP4Cache": "cache",
    "FP4Cache": "integrations.transformers",
    # evaluation
    "Trajectory": "evaluation",
    "generate_trajectory": "evaluation",
    "load_trajectories": "evaluation",
    "save_trajectories": "evaluation",
    "run_kl": "evaluation",
    # errors
    "BitDecodingError": "errors",
    "CalibrationError": "errors",
    "InvalidInputError": "errors",
    "ModelSourceError": "errors",
    "UnsupportedError": "errors",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
