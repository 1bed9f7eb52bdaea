"""A slow second implementation of the numerics contract: one number at a time, rounding by exact comparison.

Shares no code with the library. Arithmetic that the contract puts in fp32 runs on numpy.float32 scalars; nearest values
are found by trying all of them with exact fractions.
"""

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

F32 = np.float32
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _e4m3_value(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_MAGNITUDES = tuple(_e4m3_value(byte) for byte in range(127))


class Block(NamedTuple):
    scale_byte: int
    scale: float
    codes: list[int]


@lru_cache(maxsize=100_000)
def nearest(magnitude: float, grid: tuple[float, ...]) -> int:
    """Index of the closest grid value, the even index on a tie; the last index beyond the grid."""
    exact = Fraction(min(magnitude, grid[-1]))
    distances = [abs(exact - Fraction(value)) for value in grid]
    closest = [index for index, distance in enumerate(distances) if distance == min(distances)]
    return closest[0] if len(closest) == 1 else next(index for index in closest if index % 2 == 0)


def e2m1_code(x: F32) -> int:
    return nearest(abs(float(x)), E2M1_MAGNITUDES) | (8 if math.copysign(1, x) < 0 else 0)


def e2m1_value(code: int) -> F32:
    return F32(-E2M1_MAGNITUDES[code & 7] if code & 8 else E2M1_MAGNITUDES[code])


def e4m3_byte(x: F32) -> int:
    return nearest(float(x), E4M3_MAGNITUDES)


def candidate_bytes(amax: F32, fmt: str, rule: str) -> list[int]:
    """Scale bytes that a rule allows, in order of preference."""
    if fmt == "nvfp4":
        divisors = {"max6": [6], "max4": [4], "max2": [2], "4over6": [6, 4]}[rule]
        return [e4m3_byte(amax / F32(divisor)) for divisor in divisors]
    if amax == 0:
        return [0, 0] if rule == "search" else [0]
    exponent = max(-127, min(127, math.frexp(float(amax))[1] - 1 - 2))
    if rule == "up" and Fraction(float(amax)) > 6 * Fraction(2) ** exponent:
        exponent += 1
    return [exponent + 127, exponent + 128] if rule == "search" else [exponent + 127]


def scale_value(byte: int, fmt: str) -> F32:
    return F32(E4M3_MAGNITUDES[byte] if fmt == "nvfp4" else 2.0 ** (byte - 127))


def codes_against(block: list[F32], scale: F32, amax: F32) -> list[int]:
    if scale == 0 or amax == 0:
        return [0] * len(block)
    return [e2m1_code(x / scale) for x in block]


def tree_sum(terms: list[F32]) -> F32:
    """Neighbours added pairwise in fp32, the order that the library documents for block errors."""
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


def quantize_block(values: list[float], fmt: str, rule: str) -> Block:
    """One block; ``values`` hold fp32 numbers."""
    block = [F32(value) for value in values]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        amax = max(abs(x) for x in block)
        best, best_error = None, None
        for byte in candidate_bytes(amax, fmt, rule):
            scale = scale_value(byte, fmt)
            codes = codes_against(block, scale, amax)
            error = tree_sum([(scale * e2m1_value(c) - x) ** 2 for c, x in zip(codes, block, strict=True)])
            if best is None or error < best_error:
                best, best_error = Block(byte, float(scale), codes), error
    assert best is not None
    return best


def quantize_row_ldlq(row: list[float], c: np.ndarray, d: np.ndarray, fmt: str, rule: str) -> list[Block]:
    """LDLQ of one row, feeding errors forward one channel at a time; ``c`` [d, d] and ``d`` [d] fp32."""
    size = 16 if fmt == "nvfp4" else 32
    x = [F32(value) for value in row]
    errors: list[F32] = []
    blocks = []
    for start in range(0, len(x), size):
        u = {}
        for j in range(start, start + size):
            u[j] = x[j]
            for i in range(start):
                u[j] = u[j] - errors[i] * c[i, j]
        amax = max(abs(value) for value in u.values())
        best, best_cost, best_errors = None, None, None
        for byte in candidate_bytes(amax, fmt, rule):
            scale = scale_value(byte, fmt)
            codes: list[int] = []
            own: list[F32] = []
            cost = F32(0)
            for j in range(start, start + size):
                t = u[j]
                for i, error in enumerate(own):
                    t = t - error * c[start + i, j]
                code = codes_against([t], scale, amax)[0]
                value = scale * e2m1_value(code)
                codes.append(code)
                own.append(value - x[j])
                cost = cost + d[j] * (value - t) ** 2
            if best is None or cost < best_cost:
                best, best_cost, best_errors = Block(byte, float(scale), codes), cost, own
        assert best is not None and best_errors is not None
        blocks.append(best)
        errors += best_errors
    return blocks
