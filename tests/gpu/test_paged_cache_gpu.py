"""`PagedFP4Cache` on kernels against the same class in plain PyTorch, step by step."""

import pytest
import torch
from decode_cases import calibration

from bitdecoding import PagedFP4Cache, Recipe, get_recipe
from bitdecoding.cache.paged import Backend
from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.recipe import Arithmetic, ProbabilityFormat
from bitdecoding.reference.vectorized import LogitRule

pytestmark = pytest.mark.gpu

HEADS, GROUP = 2, 4


class Pair:
    """Two caches that take the same steps; with FP4 probabilities also a third one, in 16-bit arithmetic.

    The rounding of FP4 probabilities depends on the running maximum, and so on who computes which tokens: two correct
    results differ by about as much as either differs from 16-bit arithmetic. `tests/gpu/test_decode_gpu.py` compares
    such results closely, with the reference cut as the kernel is; here the kernels must not be less accurate.
    """

    def __init__(self, recipe: Recipe, *, dim=128, layers=2, windows=None, dtype=torch.bfloat16, softcap=None):
        self.dim, self.dtype = dim, dtype
        self.logits = LogitRule(dim**-0.5, softcap)
        statistics = calibration(HEADS, dim)
        statistics = type(statistics)(
            statistics.key_mean.expand(layers, -1, -1), statistics.query_second_moment.expand(layers, -1, -1, -1)
        )
        self.caches = [
            PagedFP4Cache(
                recipe, layers, HEADS, dim, statistics, windows=windows, device="cuda", dtype=dtype, backend=backend
            )
            for backend in (Backend.KERNELS, Backend.TORCH)
        ]
        assert [cache.backend for cache in self.caches] == [Backend.KERNELS, Backend.TORCH]
        if recipe.probability_format is ProbabilityFormat.FP4:
            w16 = recipe.with_arithmetic(Arithmetic.W16)
            self.caches.append(
                PagedFP4Cache(
                    w16,
                    layers,
                    HEADS,
                    dim,
                    statistics,
                    windows=windows,
                    device="cuda",
                    dtype=dtype,
                    backend=Backend.TORCH,
                )
            )
        self.generator = torch.Generator(device="cuda").manual_seed(0)

    def randn(self, rows: int, heads: int, tokens: int) -> torch.Tensor:
        # As models have it: heads and tokens exchanged, not contiguous
        shape = (rows, tokens, heads, self.dim)
        return torch.randn(shape, generator=self.generator, device="cuda").to(self.dtype).transpose(1, 2)

    def step(self, rows: int, tokens: int, padding=None) -> None:
        for index in range(len(self.caches[0].layers)):
            q, k, v = (self.randn(rows, heads, tokens) for heads in (HEADS * GROUP, HEADS, HEADS))
            results = [cache.layers[index].attend(q, k, v, self.logits, padding) for cache in self.caches]
            assert results[0].shape == results[1].shape and results[0].dtype == results[1].dtype
            for row in range(rows):
                real = slice(padding[row] if padding else 0, None)
                ours, peer, *truth = (result[row, :, real].float() for result in results)
                if truth:
                    error, allowed = (ours - truth[0]).norm(), 1.3 * (peer - truth[0]).norm() + 0.01 * peer.norm()
                else:
                    error, allowed = (ours - peer).norm(), 0.01 * peer.norm()
                assert error <= allowed, (index, row, float(error / peer.norm()))
        assert self.caches[0].lengths == self.caches[1].lengths
        ours, expected = (cache.memory() for cache in self.caches[:2])
        assert (ours.tokens, ours.sink_used, ours.bf16) == (expected.tokens, expected.sink_used, expected.bf16)

    def select(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.select_rows(rows)

    def free(self) -> None:
        for cache in self.caches:
            cache.free()


def recipe_of(name: str, native: bool) -> Recipe:
    recipe = get_recipe(name)
    return recipe if native else recipe.with_arithmetic(Arithmetic.W16)


RECIPES = ["bitdecoding-nvfp4", "bitdecoding-mxfp4", "bitdecoding-nvfp4-plus", "bitdecoding-mxfp4-plus"]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_steps(name, native):
    pair = Pair(recipe_of(name, native))
    pair.step(3, 300)
    for tokens in (1, 1, 2, 8, 70, 1, 3, 129, 1):
        pair.step(3, tokens)
    pair.free()
    pair.step(1, 17)
    for _ in range(2):
        pair.step(1, 1)


@pytest.mark.parametrize("dim, dtype", [(64, torch.float16), (256, torch.bfloat16), (128, torch.float16)])
def test_shapes_and_dtypes(dim, dtype):
    pair = Pair(recipe_of("bitdecoding-nvfp4", False), dim=dim, dtype=dtype)
    for tokens in (200, 1, 60, 5, 1):
        pair.step(2, tokens)


def test_left_padding_and_page_boundaries():
    pair = Pair(recipe_of("bitdecoding-nvfp4", False))
    pair.step(4, 260, padding=[0, 4, 133, 259])
    for _ in range(140):
        pair.step(4, 1)


def test_windows_and_soft_cap():
    pair = Pair(recipe_of("bitdecoding-nvfp4", False), layers=3, windows=[None, 100, 300], softcap=30.0)
    pair.step(2, 500)
    for tokens in (1, 1, 8, 90, 1, 40, 300, 1, 2):
        pair.step(2, tokens)


def test_rows_are_selected_and_copied():
    pair = Pair(recipe_of("bitdecoding-nvfp4", False))
    pair.step(2, 300)
    pair.step(2, 1)
    pair.select([1, 0, 1, 1])
    for _ in range(3):
        pair.step(4, 1)
    pair.select([3, 0])
    for _ in range(90):
        pair.step(2, 1)
    pair.select([0, 0])
    pair.step(2, 5)


def test_append_without_attention():
    pair = Pair(recipe_of("bitdecoding-nvfp4", False))
    for tokens in (100, 200, 5):
        for index in range(2):
            k, v = pair.randn(2, HEADS, tokens), pair.randn(2, HEADS, tokens)
            for cache in pair.caches:
                cache.layers[index].append(k, v)
    pair.step(2, 1)


def test_wrong_steps_are_refused():
    pair = Pair(recipe_of("bitdecoding-nvfp4", False))
    cache = pair.caches[0]
    q, k = pair.randn(1, HEADS * GROUP, 4), pair.randn(1, HEADS, 4)
    with pytest.raises(InvalidInputError, match="in order"):
        cache.layers[1].attend(q, k, k, pair.logits)
    cache.layers[0].attend(q, k, k, pair.logits)
    with pytest.raises(InvalidInputError, match="same step"):
        cache.layers[0].attend(q, k, k, pair.logits)
    with pytest.raises(InvalidInputError, match="in progress"):
        cache.select_rows([0])
    cache.free()
    with pytest.raises(InvalidInputError, match="bfloat16"):
        cache.layers[0].attend(q.float(), k.float(), k.float(), pair.logits)


def test_backends_are_chosen():
    common = dict(num_layers=1, num_kv_heads=1, device="cuda")
    recipe = get_recipe("bitdecoding-nvfp4").replace(key_smoothing=False)
    assert PagedFP4Cache(recipe, head_dim=128, **common).backend is Backend.KERNELS
    assert PagedFP4Cache(recipe, head_dim=96, **common).backend is Backend.TORCH
    assert PagedFP4Cache(recipe, head_dim=128, dtype=torch.float32, **common).backend is Backend.TORCH
    assert PagedFP4Cache(get_recipe("fp8"), head_dim=128, **common).backend is Backend.TORCH
    for bad in (dict(recipe=recipe, head_dim=96), dict(recipe=get_recipe("fp8"), head_dim=128)):
        with pytest.raises(UnsupportedError):
            PagedFP4Cache(**bad, **common, backend="kernels")
