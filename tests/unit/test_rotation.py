"""Rotations: Sylvester order written out, orthogonality, signs, random rotations and unchanged products k·q."""

import math

import pytest
import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics import hadamard_matrix, hadamard_transform, random_rotation
from bitdecoding.numerics.rotation import apply_signs, hadamard_block, hadamard_signs

BLOCKS = {64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256}
each_head_dim = pytest.mark.parametrize("head_dim", BLOCKS)


def sylvester(head_dim: int, block: int) -> torch.Tensor:
    """I ⊗ H by its definition: the sign of entry (i, j) is the parity of the bits that i and j share."""
    entries = [
        [(-1.0) ** (i & j & (block - 1)).bit_count() if i // block == j // block else 0.0 for j in range(head_dim)]
        for i in range(head_dim)
    ]
    return torch.tensor(entries) * block**-0.5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_orthogonal(matrix: torch.Tensor) -> None:
    product = matrix.double() @ matrix.double().T
    torch.testing.assert_close(product, torch.eye(len(matrix), dtype=torch.float64), atol=2e-6, rtol=0)


@each_head_dim
def test_sylvester_order_and_block_diagonal(head_dim: int):
    assert hadamard_block(head_dim) == BLOCKS[head_dim]
    assert torch.equal(hadamard_matrix(head_dim), sylvester(head_dim, BLOCKS[head_dim]))


@pytest.mark.parametrize(("head_dim", "block"), [(128, 16), (128, 1), (96, 8), (256, 128)])
def test_smaller_blocks(head_dim: int, block: int):
    assert torch.equal(hadamard_matrix(head_dim, block), sylvester(head_dim, block))


def test_matrix_of_four_by_hand():
    expected = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert (2 * hadamard_matrix(4)).tolist() == expected


@each_head_dim
def test_transform_multiplies_by_the_matrix(head_dim: int):
    x = normal(3, 5, head_dim)
    expected = x.double() @ hadamard_matrix(head_dim).double().T
    y = hadamard_transform(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=0)


@each_head_dim
def test_orthogonal_and_its_own_inverse(head_dim: int):
    assert_orthogonal(hadamard_matrix(head_dim))
    x = normal(10, head_dim)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(hadamard_transform(x).norm(dim=-1), x.norm(dim=-1), atol=0, rtol=1e-6)


def test_sums_of_small_integers_are_exact():
    """Butterflies add and subtract; with integers and block 64 (a factor 1/8) nothing is rounded."""
    x = torch.randint(-100, 101, (20, 64), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(hadamard_transform(x), x @ sylvester(64, 64))


def test_an_outlier_channel_is_spread_evenly():
    x = torch.zeros(128)
    x[37] = 100.0
    assert torch.equal(hadamard_transform(x).abs(), torch.full((128,), 100 * torch.tensor(128**-0.5)))


def test_rows_do_not_depend_on_the_batch():
    x = normal(4, 6, 96)
    assert torch.equal(hadamard_transform(x)[2, 3], hadamard_transform(x[2, 3]))
    assert torch.equal(hadamard_transform(x.transpose(0, 1)), hadamard_transform(x).transpose(0, 1))
    assert hadamard_transform(torch.empty(0, 7, 96)).shape == (0, 7, 96)


def test_16_bit_inputs_are_rotated_in_fp32():
    x = normal(4, 128).bfloat16()
    assert torch.equal(hadamard_transform(x), hadamard_transform(x.float()))


@pytest.mark.parametrize(("head_dim", "block"), [(128, 3), (128, 48), (96, 64), (64, 128), (64, 0), (64, -2)])
def test_bad_blocks(head_dim: int, block: int):
    with pytest.raises(InvalidInputError, match=rf"^block: {block} is not a power of two that divides head_dim"):
        hadamard_transform(torch.zeros(head_dim), block)


def test_bad_head_dim():
    with pytest.raises(InvalidInputError, match=r"^head_dim: must be positive, got 0"):
        hadamard_block(0)


def test_signs():
    signs = hadamard_signs(256, 3)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert torch.equal(signs, hadamard_signs(256, 3))
    assert not torch.equal(signs, hadamard_signs(256, 4))
    x = normal(5, 256)
    assert torch.equal(apply_signs(x, None), x)
    assert torch.equal(apply_signs(x, 3), x * signs)
    assert torch.equal(apply_signs(apply_signs(x, 3), 3), x)


def test_randomised_hadamard_is_orthogonal():
    """Rows of H·diag(signs) are the transforms of the signed unit vectors."""
    assert_orthogonal(hadamard_transform(apply_signs(torch.eye(128), 7)))


@each_head_dim
def test_random_rotation(head_dim: int):
    rotation = random_rotation(head_dim, 1)
    assert rotation.dtype == torch.float32
    assert_orthogonal(rotation)
    assert torch.equal(rotation, random_rotation(head_dim, 1))
    assert not torch.equal(rotation, random_rotation(head_dim, 2))


def test_random_rotation_has_no_preferred_direction():
    """Entries of a Haar rotation have mean 0 and variance 1/d; QR without its sign correction fails the trace."""
    rotations = torch.stack([random_rotation(16, seed) for seed in range(200)])
    standard_error = 1 / math.sqrt(16 * 200)
    assert (rotations.mean(0).abs() < 5 * standard_error).all()
    assert abs(rotations.square().mean().item() - 1 / 16) < 1e-6
    traces = rotations.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(traces.mean().item()) < 5 / math.sqrt(200)


@each_head_dim
@pytest.mark.parametrize("kind", ["hadamard", "signed hadamard", "random"])
def test_products_of_keys_and_queries_are_unchanged(head_dim: int, kind: str):
    def rotate(x: torch.Tensor) -> torch.Tensor:
        if kind == "random":
            return x @ random_rotation(head_dim, 5).T
        return hadamard_transform(apply_signs(x, 5 if kind == "signed hadamard" else None))

    k, q = normal(50, head_dim, seed=1), normal(20, head_dim, seed=2)
    assert not torch.allclose(rotate(k), k, atol=0.1)
    torch.testing.assert_close(rotate(q) @ rotate(k).T, q @ k.T, atol=5e-5, rtol=0)
