"""`LayerCodec`: applies a recipe to one layer's keys, values and queries; the only place that combines techniques."""

import math

import torch

from bitdecoding.cache.formats import (
    BitsFormat,
    EncodedPages,
    Fp4Format,
    Fp8Format,
    Int4Format,
    LloydFormat,
    PageFormat,
    RotatedFormat,
)
from bitdecoding.calibration.data import Calibration, LayerCalibration
from bitdecoding.errors import CalibrationError, InvalidInputError
from bitdecoding.numerics.blocks import quantize_dequantize
from bitdecoding.numerics.elements import decode_e4m3, encode_e4m3, floor_log2
from bitdecoding.numerics.ldlq import LdlqFactors, ldlq_factors
from bitdecoding.numerics.query import dual_residual_query
from bitdecoding.numerics.rotation import apply_signs, hadamard_transform, random_rotation
from bitdecoding.recipe import (
    KeyRounding,
    KVFormat,
    QueryFormat,
    QuerySmoothing,
    Recipe,
    Rotation,
    ValueBlocks,
)

__all__ = ["LayerCodec", "kept_dtype", "layer_codecs", "round_to_fp16_row"]


def kept_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """16-bit dtype in which a model's unquantized tokens are kept: its own, or BF16 for a wider one."""
    return model_dtype if model_dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def round_to_fp16_row(x: torch.Tensor) -> torch.Tensor:
    """Round rows of the last dim to fp16 after scaling each by a power of two to below 2 (fp32 result).

    The scaling keeps queries beyond fp16's range finite; it changes nothing for the others but subnormals.
    """
    exponent = floor_log2(x.abs().amax(-1, keepdim=True)).clamp(min=-126, max=126)
    scale = torch.exp2(exponent.float())
    return (x / scale).half().float() * scale


class LayerCodec:
    """Encodes and decodes pages of one layer and prepares queries, as a `Recipe` says.

    Args:
        recipe: the recipe.
        num_kv_heads: KV heads of the layer.
        head_dim: channels of a head.
        calibration: the layer's statistics; may be None where the recipe needs none.
        device: where µ_k and the LDLQ factors live.
        dtype: 16-bit dtype of unquantized tokens.

    Raises:
        UnsupportedError: a head_dim that the recipe's format cannot store.
        CalibrationError: the recipe needs statistics that ``calibration`` lacks, or their shape is another model's.
    """

    def __init__(
        self,
        recipe: Recipe,
        num_kv_heads: int,
        head_dim: int,
        calibration: LayerCalibration | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        recipe.check_head_dim(head_dim)
        if num_kv_heads < 1:
            raise InvalidInputError(f"num_kv_heads: must be at least 1, got {num_kv_heads}")
        self.recipe = recipe
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.tau = recipe.tau(None if calibration is None else calibration.tau)
        _check_calibration(recipe, num_kv_heads, head_dim, calibration)
        self.key_mean: torch.Tensor | None = None
        self._query_mean: torch.Tensor | None = None
        if calibration is not None and recipe.key_smoothing:
            self.key_mean = calibration.key_mean.to(self.device, torch.float32)
        if calibration is not None and recipe.query_smoothing is QuerySmoothing.TOKEN:
            assert calibration.query_mean is not None
            self._query_mean = calibration.query_mean.to(self.device, torch.float32)
        self._key_format = self._make_key_format(calibration)
        self._value_format = self._make_value_format()

    def _make_key_format(self, calibration: LayerCalibration | None) -> PageFormat:
        recipe = self.recipe
        blocks, rule = recipe.kv_format.blocks, recipe.effective_key_rule
        if blocks is None or rule is None:
            return _plain_format(recipe.kv_format, self.dtype)
        factors = None
        if recipe.key_rounding is KeyRounding.LDLQ:
            assert calibration is not None
            factors = self.ldlq_factors(calibration)
        return Fp4Format(blocks, rule, -1, factors)

    def _make_value_format(self) -> PageFormat:
        recipe = self.recipe
        blocks, rule = recipe.kv_format.blocks, recipe.effective_value_rule
        if blocks is not None and rule is not None:
            return Fp4Format(blocks, rule, -2 if recipe.value_blocks is ValueBlocks.TOKENS else -1)
        plain = _plain_format(recipe.kv_format, self.dtype)
        if recipe.kv_format is KVFormat.LLOYD4:
            return RotatedFormat(plain, self.rotate, self.unrotate)
        return plain

    def ldlq_factors(self, calibration: LayerCalibration) -> LdlqFactors:
        """LDLQ factors for this recipe's rotation: the stored ones where they fit, else from the second moment."""
        recipe = self.recipe
        plain_hadamard = (
            recipe.rotation is Rotation.HADAMARD and recipe.rotation_block is None and recipe.rotation_seed is None
        )
        if calibration.ldlq is not None and plain_hadamard and calibration.ldlq_damping == recipe.ldlq_damping:
            return LdlqFactors(calibration.ldlq.c.to(self.device), calibration.ldlq.d.to(self.device))
        moment = calibration.query_second_moment
        if moment is None:
            raise CalibrationError(
                "calibration: holds no query second moment, which LDLQ needs for this rotation; calibrate again"
            )
        # R·A·Rᵀ: rotating rows and then columns.
        rotated = self.rotate(self.rotate(moment.float().to(self.device)).transpose(-1, -2))
        return ldlq_factors(rotated, recipe.ldlq_damping)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """R·x along the last dim (fp32)."""
        recipe = self.recipe
        if recipe.rotation is Rotation.HADAMARD:
            return hadamard_transform(apply_signs(x.float(), recipe.rotation_seed), recipe.rotation_block)
        if recipe.rotation is Rotation.RANDOM:
            assert recipe.rotation_seed is not None
            return x.float() @ random_rotation(self.head_dim, recipe.rotation_seed).to(x.device).T
        return x.float()

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rᵀ·x along the last dim (fp32)."""
        recipe = self.recipe
        if recipe.rotation is Rotation.HADAMARD:
            return apply_signs(hadamard_transform(x.float(), recipe.rotation_block), recipe.rotation_seed)
        if recipe.rotation is Rotation.RANDOM:
            assert recipe.rotation_seed is not None
            return x.float() @ random_rotation(self.head_dim, recipe.rotation_seed).to(x.device)
        return x.float()

    def smooth(self, keys: torch.Tensor) -> torch.Tensor:
        """k - µ_k in fp32 for keys [..., num_kv_heads, tokens, head_dim]."""
        return keys.float() if self.key_mean is None else keys.float() - self.key_mean.unsqueeze(-2)

    def encode_keys(self, pages: torch.Tensor, first_page: torch.Tensor) -> EncodedPages:
        """Encode full pages of keys.

        Args:
            pages: post-RoPE keys [pages, num_kv_heads, PAGE_SIZE, head_dim].
            first_page: bool [pages], true for the first page of a sequence, whose sink tokens the page mean leaves out.

        Returns:
            Tensors of the storage format; with page-centred keys also ``mean`` (BF16 [pages, num_kv_heads, head_dim]).
        """
        x = self.rotate(self.smooth(pages))
        if not self.recipe.page_centered_keys:
            return self._key_format.encode(x)
        sink = self.recipe.sink_tokens
        whole = x.mean(-2)
        rest = x[..., sink:, :].mean(-2) if sink < x.shape[-2] else whole
        mean = torch.where(first_page[:, None, None], rest, whole).bfloat16()
        return {**self._key_format.encode(x - mean.float().unsqueeze(-2)), "mean": mean}

    def decode_keys(self, pages: EncodedPages) -> torch.Tensor:
        """Smoothed, rotated (and page-centred) keys, fp32 [pages, num_kv_heads, PAGE_SIZE, head_dim]."""
        return self._key_format.decode(pages)

    def encode_values(self, pages: torch.Tensor) -> EncodedPages:
        """Encode full pages of values [pages, num_kv_heads, PAGE_SIZE, head_dim]."""
        return self._value_format.encode(pages.float())

    def decode_values(self, pages: EncodedPages) -> torch.Tensor:
        """Values, fp32 [pages, num_kv_heads, PAGE_SIZE, head_dim]."""
        return self._value_format.decode(pages)

    def query_parts(self, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split queries into the fp32 tensors whose products with decoded keys add up to the logits.

        Args:
            q: post-RoPE queries [..., num_kv_heads, group, tokens, head_dim].

        Returns:
            One tensor (16-bit, FP8 or single FP4), two (dual FP4), plus one more for a smoothed query's 16-bit mean;
            all rotated, shape of ``q``.
        """
        recipe = self.recipe
        rotated = self.rotate(q)
        mean = self._smoothing_mean(rotated)
        if mean is not None:
            rotated = rotated - mean
        if recipe.query_format is QueryFormat.BITS16:
            parts: tuple[torch.Tensor, ...] = (round_to_fp16_row(rotated),)
        elif recipe.query_format is QueryFormat.FP8:
            parts = (decode_e4m3(encode_e4m3(rotated)),)
        else:
            blocks = recipe.kv_format.blocks
            assert blocks is not None
            if recipe.query_format is QueryFormat.FP4:
                parts = (quantize_dequantize(rotated, blocks),)
            else:
                dual = dual_residual_query(rotated, blocks)
                parts = (dual.first_values, dual.residual_values)
        return parts if mean is None else (*parts, mean.expand_as(rotated))

    def _smoothing_mean(self, rotated: torch.Tensor) -> torch.Tensor | None:
        """The BF16 mean (as fp32) that is taken off rotated queries and multiplied on its own; None if not smoothed."""
        if self.recipe.query_smoothing is QuerySmoothing.GQA:
            return rotated.mean(-3, keepdim=True).bfloat16().float()
        if self._query_mean is None:
            return None
        mean = self.rotate(self._query_mean.view(self.num_kv_heads, -1, 1, self.head_dim)).bfloat16().float()
        if mean.shape[-3] != rotated.shape[-3]:
            raise CalibrationError(
                f"calibration: query mean made for {mean.shape[-3]} query heads a KV head, the model has "
                f"{rotated.shape[-3]}; calibrate this model"
            )
        return mean

    def page_mean_query(self, q: torch.Tensor) -> torch.Tensor:
        """BF16(R·q) as fp32, the query that multiplies page means."""
        return self.rotate(q).bfloat16().float()


def layer_codecs(
    recipe: Recipe,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    calibration: Calibration | None,
    *,
    device: torch.device | str,
    model_dtype: torch.dtype,
) -> list[LayerCodec]:
    """One codec for each layer of a model; raises as `LayerCodec`, and for a calibration of another layer count."""
    if calibration is not None and calibration.num_layers != num_layers:
        raise CalibrationError(
            f"calibration: made for {calibration.num_layers} layers, the model has {num_layers}; calibrate it"
        )
    return [
        LayerCodec(
            recipe,
            num_kv_heads,
            head_dim,
            None if calibration is None else calibration.layer(layer),
            device=device,
            dtype=kept_dtype(model_dtype),
        )
        for layer in range(num_layers)
    ]


def _plain_format(kv_format: KVFormat, dtype: torch.dtype) -> PageFormat:
    if kv_format is KVFormat.BF16:
        return BitsFormat(dtype)
    if kv_format is KVFormat.FP8:
        return Fp8Format()
    if kv_format is KVFormat.INT4:
        return Int4Format()
    return LloydFormat()


def _check_calibration(recipe: Recipe, num_kv_heads: int, head_dim: int, calibration: LayerCalibration | None) -> None:
    if calibration is None:
        if recipe.needs_calibration:
            raise CalibrationError(
                f"calibration: recipe {recipe.name} needs one; run `bitdecoding calibrate` or switch off key_smoothing "
                f"and ldlq rounding"
            )
        return
    if calibration.tau is not None and not 0 < calibration.tau < math.inf:
        raise CalibrationError(f"calibration: its tau is {calibration.tau}, not a positive number; calibrate again")
    square = (num_kv_heads, head_dim, head_dim)
    _check_shape("key mean", calibration.key_mean, (num_kv_heads, head_dim))
    _check_shape("query second moment", calibration.query_second_moment, square)
    if calibration.ldlq is not None:
        _check_shape("LDLQ matrix", calibration.ldlq.c, square)
        _check_shape("LDLQ weights", calibration.ldlq.d, (num_kv_heads, head_dim))
    if recipe.query_smoothing is not QuerySmoothing.TOKEN:
        return
    if calibration.query_mean is None:
        raise CalibrationError("calibration: holds no query mean, which query_smoothing 'token' needs; calibrate again")
    if calibration.query_mean.shape[0] % num_kv_heads:
        raise CalibrationError(
            f"calibration: made for {calibration.query_mean.shape[0]} query heads, no multiple of the layer's "
            f"{num_kv_heads} KV heads; calibrate this model"
        )
    _check_shape("query mean", calibration.query_mean, (calibration.query_mean.shape[0], head_dim))


def _check_shape(what: str, tensor: torch.Tensor | None, expected: tuple[int, ...]) -> None:
    if tensor is not None and not bool(torch.isfinite(tensor).all()):
        raise CalibrationError(f"calibration: its {what} holds NaN or Inf; calibrate again")
    if tensor is not None and tuple(tensor.shape) != expected:
        raise CalibrationError(
            f"calibration: its {what} has shape {tuple(tensor.shape)}, the layer's KV heads and head_dim ask for "
            f"{expected}; calibrate this model"
        )
