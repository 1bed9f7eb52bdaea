"""The PyTorch cache and the Transformers integration on CUDA, against the CPU."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bitdecoding.cache import PagedFP4Cache
from bitdecoding.calibration import Calibration
from bitdecoding.integrations.transformers import FP4Cache
from bitdecoding.recipe import get_recipe, preset_names
from bitdecoding.reference.vectorized import LogitRule

pytestmark = pytest.mark.gpu
HEADS, GROUP, HEAD_DIM = 2, 3, 64


def _calibration() -> Calibration:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(1, HEADS, HEAD_DIM, generator=generator)
    q = torch.randn(1, HEADS, 512, HEAD_DIM, generator=generator)
    query_mean = torch.randn(1, HEADS * GROUP, HEAD_DIM, generator=generator)
    return Calibration(mean, q.transpose(-1, -2) @ q / 512, query_mean)


@pytest.mark.parametrize("name", [*preset_names(), "bitdecoding-nvfp4-w16", "bitdecoding-mxfp4-plus-w16"])
def test_cache_steps_equal_cpu(name):
    outputs = {}
    for device in ("cpu", "cuda"):
        cache = PagedFP4Cache(
            get_recipe(name), 1, HEADS, HEAD_DIM, _calibration(), device=device, dtype=torch.bfloat16, backend="torch"
        )
        generator = torch.Generator().manual_seed(2)
        steps = []
        for tokens in (300, 1, 2, 1):
            q, k, v = (
                torch.randn(2, heads, tokens, HEAD_DIM, generator=generator).bfloat16().to(device)
                for heads in (HEADS * GROUP, HEADS, HEADS)
            )
            steps.append(cache.layers[0].attend(q, k, v, LogitRule(HEAD_DIM**-0.5)).float().cpu())
        outputs[device] = steps
    for cpu, gpu in zip(outputs["cpu"], outputs["cuda"], strict=True):
        # exp2 and the order of sums differ between devices, which now and then moves an FP4 code of P.
        assert (cpu - gpu).norm() <= 0.02 * cpu.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_generate_on_cuda(dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=HEADS * GROUP * HEAD_DIM,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).to("cuda", dtype).eval()
    ids = torch.randint(3, 128, (2, 200), device="cuda")
    recipe = get_recipe("bitdecoding-nvfp4").replace(key_smoothing=False)
    cache = FP4Cache.for_model(model, recipe)
    output = model.generate(ids, past_key_values=cache, max_new_tokens=80, min_new_tokens=80, do_sample=False)
    assert output.shape == (2, 280)
    assert cache.memory().used < 0.6 * cache.memory().bf16
