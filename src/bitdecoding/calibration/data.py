"""What a calibration holds, for a whole model and for one of its layers."""

from dataclasses import dataclass, field
from typing import Any

import torch

from bitdecoding.numerics.ldlq import DEFAULT_DAMPING, LdlqFactors

__all__ = ["Calibration", "LayerCalibration"]


@dataclass(frozen=True)
class LayerCalibration:
    """Statistics of one layer; all tensors fp32.

    Attributes:
        key_mean: µ_k, mean of post-RoPE keys [num_kv_heads, head_dim].
        query_second_moment: E[q·qᵀ] of post-RoPE, unscaled, unrotated queries over positions and the query heads of a
            group [num_kv_heads, head_dim, head_dim], or None.
        query_mean: mean of post-RoPE queries [num_q_heads, head_dim], or None.
        tau: calibrated probability threshold, or None.
        ldlq: stored factors, valid for `ldlq_damping` and the plain Hadamard rotation, or None.
        ldlq_damping: λ that the stored factors were made with.
    """

    key_mean: torch.Tensor
    query_second_moment: torch.Tensor | None = None
    query_mean: torch.Tensor | None = None
    tau: float | None = None
    ldlq: LdlqFactors | None = None
    ldlq_damping: float = DEFAULT_DAMPING


@dataclass(frozen=True)
class Calibration:
    """Statistics of a model (paper App. B, C); a tensor per field with the layers along the first dim, fp32, on CPU.

    Attributes:
        key_mean: µ_k [num_layers, num_kv_heads, head_dim].
        query_second_moment: [num_layers, num_kv_heads, head_dim, head_dim] or None.
        query_mean: [num_layers, num_q_heads, head_dim] or None.
        tau: one threshold for the model, or None.
        ldlq: `LdlqFactors` with a leading layer dim, or None.
        ldlq_damping: λ of the stored factors.
        metadata: model id, revision, window, prompts, versions; JSON-serialisable.
    """

    key_mean: torch.Tensor
    query_second_moment: torch.Tensor | None = None
    query_mean: torch.Tensor | None = None
    tau: float | None = None
    ldlq: LdlqFactors | None = None
    ldlq_damping: float = DEFAULT_DAMPING
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.key_mean.shape[0]

    def layer(self, index: int) -> LayerCalibration:
        """The statistics of one layer."""
        return LayerCalibration(
            key_mean=self.key_mean[index],
            query_second_moment=None if self.query_second_moment is None else self.query_second_moment[index],
            query_mean=None if self.query_mean is None else self.query_mean[index],
            tau=self.tau,
            ldlq=None if self.ldlq is None else LdlqFactors(self.ldlq.c[index], self.ldlq.d[index]),
            ldlq_damping=self.ldlq_damping,
        )
