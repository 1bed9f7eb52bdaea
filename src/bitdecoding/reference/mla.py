"""Algorithm 2 written out: one decode step of multi-head latent attention over an FP4 latent cache.

All heads share one latent C (d_c = 512) a token, keys and values at once, and one positional key (d_r = 64). The latent
is stored as FP4 of H(C - µ_c) with the key search rule, in pages with 16-bit sink and recent tokens as in Algorithm 1.
W_K is absorbed into the query, W_V is applied to the attention's output. Source: paper, Algorithm 2.
"""

from dataclasses import dataclass

import torch

from bitdecoding.cache.codec import LayerCodec
from bitdecoding.cache.formats import EncodedPages
from bitdecoding.calibration.data import LayerCalibration
from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.numerics.validation import check_finite
from bitdecoding.recipe import PAGE_SIZE, ProbabilityFormat, Recipe
from bitdecoding.reference.algorithm1 import (
    RunningSoftmax,
    check_block_table,
    put_in_pool,
    split_pages,
    tokens_in_pages,
)
from bitdecoding.reference.exact import exact_attention
from bitdecoding.reference.vectorized import (
    LogitRule,
    Partial,
    combine_partials,
    in_window,
    quantized_probabilities,
)

__all__ = ["MlaCodec", "MlaSequence", "build_mla_sequence", "exact_mla", "mla_decode_step"]


class MlaCodec:
    """Encodes latents and prepares absorbed queries, as a `Recipe` says for keys; P is 16-bit whatever it says.

    Args:
        recipe: the recipe; ``key_smoothing`` switches µ_c, ``rotation`` H, ``query_format`` the dual-residual query.
        latent_dim: d_c.
        calibration: statistics of the latent in place of keys: ``key_mean`` is µ_c [1, d_c]. May be None where the
            recipe needs none.
        dtype: 16-bit dtype of unquantized latents.

    Raises:
        UnsupportedError: page-centred keys (a page's mean would also have to be added to its values).
        CalibrationError: as `LayerCodec`.
    """

    def __init__(
        self,
        recipe: Recipe,
        latent_dim: int,
        calibration: LayerCalibration | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if recipe.page_centered_keys:
            raise UnsupportedError(
                f"page_centered_keys: recipe {recipe.name} centres keys by page, which MLA's latents do not support; "
                f"switch it off"
            )
        self.latent_dim = latent_dim
        self.dtype = dtype
        # One KV head whose keys are the latents: the same smoothing, rotation, search and query split.
        self.layer = LayerCodec(
            recipe.replace(probability_format=ProbabilityFormat.BITS16), 1, latent_dim, calibration, dtype=dtype
        )

    def encode(self, latents: torch.Tensor) -> EncodedPages:
        """Encode full pages of latents [pages, PAGE_SIZE, d_c]; every tensor of the result is [pages, 1, ...]."""
        return self.layer.encode_keys(latents.unsqueeze(1), torch.arange(latents.shape[0]) == 0)

    def decode(self, pages: EncodedPages) -> torch.Tensor:
        """H(C - µ_c) after rounding, fp32 [pages, PAGE_SIZE, d_c]."""
        return self.layer.decode_keys(pages)[:, 0]

    def query_parts(self, absorbed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rotated absorbed queries [heads, q_len, d_c] as fp32 parts that add up to them: two for the dual query."""
        return tuple(part[0] for part in self.layer.query_parts(absorbed.unsqueeze(0)))

    def smooth(self, latents: torch.Tensor) -> torch.Tensor:
        """C - µ_c in fp32 for latents [tokens, d_c]."""
        return self.layer.smooth(latents.unsqueeze(0))[0]

    def restore(self, output: torch.Tensor) -> torch.Tensor:
        """Hᵀ·o + µ_c for sums o of rotated, smoothed latents [..., d_c] whose weights add up to 1."""
        plain = self.layer.unrotate(output)
        return plain if self.layer.key_mean is None else plain + self.layer.key_mean[0]


@dataclass(frozen=True)
class MlaSequence:
    """One sequence's latent cache of one layer; tokens are divided as in `PagedSequence`.

    Attributes:
        latent_pages: encoded pages of the pool, every tensor [num_pool_pages, 1, ...]; empty where no page is used.
        rope_pages: 16-bit positional keys of the same pages [num_pool_pages, PAGE_SIZE, d_r].
        block_table: int [at least the pages used], pool page of each page.
        recent_latents: 16-bit [at least length - n_fp4, d_c].
        recent_rope: 16-bit positional keys of the same tokens [..., d_r].
        length: tokens cached with the new ones of the step.
        sink_latents: 16-bit first tokens [up to 128, d_c], or None where they are not at hand.
        sink_rope: 16-bit positional keys of the same tokens, or None.
    """

    latent_pages: EncodedPages
    rope_pages: torch.Tensor
    block_table: torch.Tensor
    recent_latents: torch.Tensor
    recent_rope: torch.Tensor
    length: int
    sink_latents: torch.Tensor | None = None
    sink_rope: torch.Tensor | None = None


def build_mla_sequence(
    latents: torch.Tensor,
    k_rope: torch.Tensor,
    codec: MlaCodec,
    *,
    new_tokens: int = 1,
    keep_sink: bool = True,
    block_table: torch.Tensor | None = None,
) -> MlaSequence:
    """The latent cache of a sequence as a step with ``new_tokens`` new tokens finds it.

    Args:
        latents: C [N, d_c], floating point, rounded to ``codec.dtype`` first. N may be 0.
        k_rope: positional keys after RoPE [N, d_r], rounded alike.
        codec: encodes the pages.
        new_tokens, keep_sink, block_table: as `build_sequence`.

    Raises:
        InvalidInputError: as `build_sequence`.
    """
    check_finite("latents", latents)
    check_finite("k_rope", k_rope)
    if latents.dim() != 2 or latents.shape[1] != codec.latent_dim:
        raise InvalidInputError(f"latents: expected [N, {codec.latent_dim}], got {tuple(latents.shape)}")
    if k_rope.dim() != 2 or k_rope.shape[0] != latents.shape[0]:
        raise InvalidInputError(f"k_rope: expected [{latents.shape[0]}, d_r], got {tuple(k_rope.shape)}")
    latents, k_rope = latents.to(codec.dtype), k_rope.to(codec.dtype)
    length = latents.shape[0]
    n_fp4 = tokens_in_pages(length, new_tokens)
    num_pages = n_fp4 // PAGE_SIZE
    block_table = torch.arange(num_pages) if block_table is None else block_table
    used = check_block_table(block_table, num_pages)
    pages: EncodedPages = {}
    if num_pages:
        pages = {
            **codec.encode(latents[:n_fp4].unflatten(0, (num_pages, PAGE_SIZE))),
            "rope": k_rope[:n_fp4].unflatten(0, (num_pages, PAGE_SIZE)),
        }
    pool = put_in_pool(pages, used)
    sink = codec.layer.recipe.sink_tokens if keep_sink and num_pages else 0
    return MlaSequence(
        rope_pages=pool.pop("rope", k_rope.new_zeros(0, PAGE_SIZE, k_rope.shape[1])),
        latent_pages=pool,
        block_table=block_table,
        recent_latents=latents[n_fp4:],
        recent_rope=k_rope[n_fp4:],
        length=length,
        sink_latents=latents[:sink] if sink else None,
        sink_rope=k_rope[:sink] if sink else None,
    )


def mla_decode_step(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    sequence: MlaSequence,
    codec: MlaCodec,
    *,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    scale: float,
    num_splits: int = 1,
) -> Partial:
    """One decode step of multi-head latent attention (paper, Algorithm 2).

    Args:
        q_nope: queries of the last q_len tokens without position [heads, q_len, d_nope].
        q_rope: their positional part after RoPE [heads, q_len, d_r], rounded to BF16.
        sequence: the latent cache, the new tokens included.
        codec: the layer's codec.
        w_k: up-projection of keys [heads, d_nope, d_c]: a head's key is w_k·c.
        w_v: up-projection of values [heads, d_c, d_v]: a head's value is c·w_v.
        scale: softmax scale on the sum of both products, 1/sqrt(d_nope + d_r) usually.
        num_splits: parts the pages are cut into; may exceed the pages.

    Returns:
        `Partial` in fp32: output [heads, q_len, d_v] and base-2 lse [heads, q_len] (of logits against C - µ_c); 0 and
        -inf for a sequence of length 0.

    Raises:
        InvalidInputError: NaN or Inf in queries or 16-bit tokens, shapes that do not fit, fewer recent tokens than the
            step needs, ``num_splits`` below 1.
    """
    _check_step(q_nope, q_rope, codec, w_k, w_v, sequence.rope_pages.shape[-1])
    heads, q_len = q_nope.shape[:2]
    n_fp4 = tokens_in_pages(sequence.length, q_len)
    splits = split_pages(n_fp4 // PAGE_SIZE, num_splits)
    if sequence.length == 0:
        return Partial(torch.zeros(heads, q_len, w_v.shape[-1]), torch.full((heads, q_len), -torch.inf))
    table = check_block_table(sequence.block_table, n_fp4 // PAGE_SIZE, sequence.latent_pages)
    latents, rope, bits16_pos, sink = _bits16_tokens(sequence, n_fp4)
    logits = LogitRule(scale)

    # Absorb W_K into the query, rotate and quantize it; the positional query stays BF16.
    absorbed = q_nope.float() @ w_k.float()  # [heads, q_len, d_c]
    parts = [part.flatten(0, 1) for part in codec.query_parts(absorbed)]  # rows = heads · q_len
    positional = q_rope.bfloat16().float().flatten(0, 1)
    row_pos = torch.arange(sequence.length - q_len, sequence.length).repeat(heads).unsqueeze(-1)

    def round_p(scores: torch.Tensor, maximum: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return quantized_probabilities(codec.layer, scores, maximum, p)  # to 16 bits

    partials = []
    for pages in splits:
        softmax = RunningSoftmax(row_pos.shape[0], codec.latent_dim)
        for page in pages:
            encoded = {name: x[table[page] : table[page] + 1] for name, x in sequence.latent_pages.items()}
            stored = codec.decode(encoded)[0]  # H(C - µ_c), keys and values at once
            products = positional @ sequence.rope_pages[table[page]].float().T
            for part in parts:
                products = products + part @ stored.T
            key_pos = torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            visible = in_window(row_pos, key_pos, None) & (key_pos >= sink)
            softmax.add(logits(products).masked_fill(~visible, -torch.inf), stored, round_p)
        partials.append(softmax.partial())
    paged = combine_partials(partials)
    # Undo the rotation and add µ_c: a row's unrounded weights over the pages add up to 1 (where it read no page, lse is
    # -inf and the sum counts for nothing).
    paged = Partial(codec.restore(paged.output), paged.lse)

    # Sink and recent tokens in 16 bits: logits against C - µ_c like all others, values raw.
    products = absorbed.flatten(0, 1) @ codec.smooth(latents).T + positional @ rope.float().T
    softmax = RunningSoftmax(row_pos.shape[0], codec.latent_dim)
    softmax.add(logits(products).masked_fill(~in_window(row_pos, bits16_pos, None), -torch.inf), latents.float())

    joined = combine_partials([paged, softmax.partial()])
    output = joined.output.unflatten(0, (heads, q_len)) @ w_v.float()
    return Partial(output, joined.lse.unflatten(0, (heads, q_len)))


def _bits16_tokens(sequence: MlaSequence, n_fp4: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Latents, positional keys and positions of sink and recent tokens, and the sink's length (0 where not at hand)."""
    needed = sequence.length - n_fp4
    if min(sequence.recent_latents.shape[0], sequence.recent_rope.shape[0]) < needed:
        raise InvalidInputError(
            f"recent_latents, recent_rope: hold {sequence.recent_latents.shape[0]} and "
            f"{sequence.recent_rope.shape[0]} tokens, the step needs {needed}; build the sequence for the same number "
            f"of new tokens"
        )
    latents, rope = sequence.recent_latents[:needed], sequence.recent_rope[:needed]
    positions = torch.arange(n_fp4, sequence.length)
    sink = 0
    if n_fp4 and sequence.sink_latents is not None and sequence.sink_rope is not None:
        sink = sequence.sink_latents.shape[0]
        latents, rope = torch.cat((sequence.sink_latents, latents)), torch.cat((sequence.sink_rope, rope))
        positions = torch.cat((torch.arange(sink), positions))
    check_finite("16-bit latents", latents)
    check_finite("16-bit positional keys", rope)
    return latents, rope, positions, sink


def _check_step(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    codec: MlaCodec,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    rope_dim: int,
) -> None:
    check_finite("q_nope", q_nope)
    check_finite("q_rope", q_rope)
    if q_nope.dim() != 3 or 0 in q_nope.shape:
        raise InvalidInputError(f"q_nope: expected [heads, q_len, d_nope], got {tuple(q_nope.shape)}")
    heads, q_len, nope = q_nope.shape
    expected = {
        "q_rope": (q_rope, (heads, q_len, rope_dim)),
        "w_k": (w_k, (heads, nope, codec.latent_dim)),
        "w_v": (w_v, (heads, codec.latent_dim, w_v.shape[-1])),
    }
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != shape:
            raise InvalidInputError(f"{name}: expected {shape}, got {tuple(x.shape)}")


def exact_mla(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    scale: float,
) -> Partial:
    """Multi-head latent attention in fp64 with keys and values written out, for tests.

    Args:
        q_nope, q_rope, w_k, w_v, scale: as `mla_decode_step`; nothing is rounded.
        latents: C [N, d_c].
        k_rope: positional keys [N, d_r].

    Returns:
        `Partial` in fp64: output [heads, q_len, d_v], base-2 lse [heads, q_len] of the logits against C.

    Raises:
        InvalidInputError: as `exact_attention`.
    """
    heads = q_nope.shape[0]
    keys = latents.double() @ w_k.double().transpose(-1, -2)  # [heads, N, d_nope]
    positional = k_rope.double().expand(heads, *k_rope.shape)
    return exact_attention(
        torch.cat((q_nope.double(), q_rope.double()), -1),
        torch.cat((keys, positional), -1),
        latents.double() @ w_v.double(),
        scale=scale,
        query_pos=torch.arange(latents.shape[0] - q_nope.shape[1], latents.shape[0]),
        key_pos=torch.arange(latents.shape[0]),
    )
