"""Pure PyTorch numerics: elements, scales, block quantizers, rotations, query and probability rules.

Each module owns one rule of the contract; nothing here knows about caches, models or devices.
"""

from bitdecoding.numerics.blocks import (
    BlockFormat,
    QuantizedBlocks,
    ScaleRule,
    dequantize_blocks,
    quantize_blocks,
    quantize_dequantize,
)
from bitdecoding.numerics.elements import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
)
from bitdecoding.numerics.ldlq import LdlqFactors, ldlq_factors, quantize_blocks_ldlq
from bitdecoding.numerics.packing import pack_nibbles, unpack_nibbles
from bitdecoding.numerics.probability import ProbabilityRule, quantize_probabilities, two_level_probabilities
from bitdecoding.numerics.query import DualQuery, dual_residual_query
from bitdecoding.numerics.rotation import hadamard_matrix, hadamard_transform, random_rotation

__all__ = [
    "BlockFormat",
    "DualQuery",
    "LdlqFactors",
    "ProbabilityRule",
    "QuantizedBlocks",
    "ScaleRule",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize_blocks",
    "dual_residual_query",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "hadamard_matrix",
    "hadamard_transform",
    "ldlq_factors",
    "pack_nibbles",
    "quantize_blocks",
    "quantize_blocks_ldlq",
    "quantize_dequantize",
    "quantize_probabilities",
    "random_rotation",
    "two_level_probabilities",
    "unpack_nibbles",
]
