"""Record what fouroversix and NVIDIA Model Optimizer make of fixed blocks, into peers.json beside this file.

Neither is in the dev extra: fouroversix installs only with SKIP_CUDA_BUILD=1 and without build isolation, and Model
Optimizer brings some 190 MB of packages. To record again, in a throw-away environment that holds CPU torch::

    SKIP_CUDA_BUILD=1 pip install --no-deps --no-build-isolation fouroversix==1.0.5
    pip install nvidia-modelopt==0.47.0
    python tests/cases/record_peers.py

Both scale NVFP4 by the tensor's maximum, which this project does not; the maxima given here (1536, 2688) make that
factor 1.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from fouroversix import DataType, ScaleRule
from fouroversix.quantize.pytorch.reference import quantize_to_fp4
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor


def make_rows() -> torch.Tensor:
    """Bf16 rows of 32: heavy-tailed ones over a range of magnitudes, and quarters, which meet ties."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(32, 32, generator=generator)
    chi = torch.randn(32, 32, 4, generator=generator).square().mean(-1)
    heavy = normal / chi.sqrt() * torch.exp2(torch.arange(32).float() % 8 - 2)[:, None]
    quarters = torch.randint(-24, 25, (16, 32), generator=generator) / 4
    return torch.cat([heavy, quarters]).bfloat16().float()


def by_fouroversix(rows: torch.Tensor, fmt: str, rule: ScaleRule, tensor_max: float | None) -> dict[str, list]:
    values, scales, _ = quantize_to_fp4(
        rows,
        None if tensor_max is None else torch.tensor(tensor_max),
        fp4_format=DataType(fmt),
        scale_rule=rule,
        pack_values=False,
        use_blackwell_scale_layout=False,
    )
    return record(values.float(), scales.view(torch.uint8).reshape(len(rows), -1))


def by_modelopt_nvfp4(rows: torch.Tensor) -> dict[str, list]:
    one = torch.tensor(1.0)
    packed, scales, _ = NVFP4QTensor.quantize(rows.clone(), 16, weights_scaling_factor_2=one)
    unit = torch.ones_like(scales.float())
    values = packed.dequantize(torch.float32, scale=unit, double_scale=one, block_sizes={-1: 16})
    return record(values, scales.view(torch.uint8).reshape(len(rows), -1))


def by_modelopt_mxfp4(rows: torch.Tensor) -> dict[str, list]:
    packed, scales = MXFP4QTensor.quantize(rows.clone(), 32)
    unit = torch.full_like(scales, 127)
    values = packed.dequantize(torch.float32, scale=unit, block_sizes={-1: 32})
    return record(values, scales.reshape(len(rows), -1))


def record(values: torch.Tensor, scale_bytes: torch.Tensor) -> dict[str, list]:
    return {"elements": values.tolist(), "scale_bytes": scale_bytes.tolist()}


def main() -> None:
    rows = make_rows()
    four_over_six, modelopt = (f"{name} {version(name)}" for name in ("fouroversix", "nvidia-modelopt"))
    table = {
        "note": "Written by record_peers.py. elements: E2M1 values, by row of 32; scale_bytes: by block.",
        "rows": rows.tolist(),
        "results": [
            {"by": four_over_six, "format": "nvfp4", "scale_rule": "4over6"}
            | by_fouroversix(rows, "nvfp4", ScaleRule.mse, 1536.0),
            {"by": four_over_six, "format": "nvfp4", "scale_rule": "max6"}
            | by_fouroversix(rows, "nvfp4", ScaleRule.static_6, 2688.0),
            {"by": four_over_six, "format": "mxfp4", "scale_rule": "up"}
            | by_fouroversix(rows, "mxfp4", ScaleRule.static_6, None),
            {"by": modelopt, "format": "nvfp4", "scale_rule": "max6"} | by_modelopt_nvfp4(rows),
            {"by": modelopt, "format": "mxfp4", "scale_rule": "up"} | by_modelopt_mxfp4(rows),
        ],
    }
    Path(__file__).with_name("peers.json").write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
