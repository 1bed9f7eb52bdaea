"""4-bit (NVFP4 and MXFP4) KV cache for LLM decoding: exact numerics, recipes, reference attention and calibration."""

__version__ = "0.1.0"
