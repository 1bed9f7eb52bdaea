"""The paged cache: storage, steps, and attention checked against dense computations and `DecodeView`."""

import itertools
import math
import warnings

import pytest
import torch

from bitdecoding.cache import paged as paged_module
from bitdecoding.cache.codec import LayerCodec
from bitdecoding.cache.paged import (
    BlockTable,
    CacheMemory,
    EncodedKeysValues,
    PagedFP4Cache,
    PagedLayer,
    PagePool,
    TorchBackend,
)
from bitdecoding.calibration import Calibration
from bitdecoding.errors import CalibrationError, InvalidInputError, UnsupportedError
from bitdecoding.integrations.transformers.probing import DecodeView
from bitdecoding.recipe import PAGE_SIZE, get_recipe, preset_names
from bitdecoding.reference.vectorized import LogitRule

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, GROUP, DIM = 2, 2, 32
LOGITS = LogitRule(DIM**-0.5)


def calibration(layers: int = 1, heads: int = HEADS, dim: int = DIM) -> Calibration:
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(layers, heads, dim, dim, generator=generator)
    return Calibration(
        key_mean=torch.randn(layers, heads, dim, generator=generator),
        query_second_moment=root @ root.transpose(-1, -2) / dim,
        query_mean=torch.randn(layers, heads * GROUP, dim, generator=generator) * 0.1,
    )


def make_layer(name: str = "bitdecoding-nvfp4", window: int | None = None, dim: int = DIM, **options) -> PagedLayer:
    cache = PagedFP4Cache(
        get_recipe(name), 1, HEADS, dim, calibration(dim=dim), windows=[window], dtype=torch.float32, **options
    )
    return cache.layers[0]


def make_codec(name: str, dim: int = DIM) -> LayerCodec:
    return LayerCodec(get_recipe(name), HEADS, dim, calibration(dim=dim).layer(0))


def tokens(count: int, rows: int = 1, seed: int = 0, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values in fp32, of 16-bit precision; keys with a mean and an outlier channel, so that a wrong
    read shows."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, HEADS * GROUP, count, dim, generator=generator) * 2
    k = torch.randn(rows, HEADS, count, dim, generator=generator) + 1
    k[..., 3] *= 4
    v = torch.randn(rows, HEADS, count, dim, generator=generator)
    return q.half().float(), k.bfloat16().float(), v.bfloat16().float()


def steps(layer: PagedLayer, q, k, v, sizes, logits: LogitRule = LOGITS, padding=None) -> torch.Tensor:
    """Outputs of consecutive steps of these sizes; padding goes with the first."""
    outputs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        outputs.append(layer.attend(q[..., part, :], k[..., part, :], v[..., part, :], logits, padding))
        start, padding = start + size, None
    return torch.cat(outputs, -2)


def dense(q, k, v, window=None, logits: LogitRule = LOGITS) -> torch.Tensor:
    """Plain causal attention in fp64 over all tokens."""
    k, v = (x.double().repeat_interleave(GROUP, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * logits.scale
    if logits.softcap is not None:
        scores = torch.tanh(scores / logits.softcap) * logits.softcap
    position = torch.arange(q.shape[-2])
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < (window or math.inf))
    return torch.softmax(scores.masked_fill(~visible, -math.inf), -1) @ v


# --- Storage


def test_pool_grows_by_doubling_and_reuses_pages():
    pool = PagePool()

    def pages(first: int, count: int) -> EncodedKeysValues:
        values = torch.arange(first, first + count).float()[:, None, None].expand(count, 2, 3)
        return EncodedKeysValues({"codes": values}, {"codes": -values})

    a = pool.store(pages(0, 3))
    assert (a, pool.capacity) == ([0, 1, 2], 3)
    b = pool.store(pages(3, 1))
    assert (b, pool.capacity, pool.num_used) == ([3], 6, 4)
    pool.keep_only({0, 3})
    c = pool.store(pages(7, 2))
    assert set(c) == {1, 2} and pool.capacity == 6
    gathered = pool.gather(torch.tensor([0, *c, 3]))
    assert gathered.keys["codes"][:, 0, 0].tolist() == [0, 7, 8, 3]
    assert gathered.values["codes"][:, 1, 2].tolist() == [0, -7, -8, -3]
    assert pool.page_bytes == 2 * 2 * 3 * 4


def test_block_table_rows_share_and_drop_pages():
    table = BlockTable(2, torch.device("cpu"))
    table.extend(0, [4, 5, 6])
    table.extend(1, [7])
    assert table.tensor().tolist() == [[4, 5, 6], [7, -1, -1]]
    table.select([0, 0, 1])
    assert table.drop_before(0, 2) and not table.drop_before(0, 2) and not table.drop_before(0, 0)
    assert table.drop_before(2, 9)
    assert table.tensor().tolist() == [[-1, -1, 6], [4, 5, 6], [-1, -1, -1]]
    assert table.used() == {4, 5, 6}
    assert [table.num_gone(row) for row in range(3)] == [2, 0, 1]
    assert [table.num_pages(row) for row in range(3)] == [3, 3, 1]


@pytest.mark.parametrize("name", ["bitdecoding-nvfp4-plus", "bitdecoding-mxfp4", "bf16", "saw-int4"])
def test_stored_pages_are_the_codec_s_and_the_same_for_prefill_and_decode(name):
    q, k, v = tokens(300)
    codec = make_codec(name)
    cut = [x.bfloat16()[0, :, : 2 * PAGE_SIZE].unflatten(1, (2, PAGE_SIZE)).transpose(0, 1) for x in (k, v)]
    keys = codec.encode_keys(cut[0], torch.tensor([True, False]))
    values = codec.encode_values(cut[1])
    for sizes in ([300], [100, *[1] * 200], [100, 4, 150, 46]):
        layer = make_layer(name)
        steps(layer, q, k, v, sizes)
        held = layer.store.pool.gather(layer.store.table.tensor()[0])
        for part, expected in ((held.keys, keys), (held.values, values)):
            assert part.keys() == expected.keys()
            for tensor in expected:
                assert torch.equal(part[tensor], expected[tensor]), tensor
        assert torch.equal(layer.store.recent_keys[0, :, :44], k.bfloat16()[0, :, 256:])
        sink = layer.store.sink_tokens
        assert torch.equal(layer.store.sink_values[0], v.bfloat16()[0, :, :sink])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 255, 256, 257])
def test_lengths_around_page_boundaries(length):
    layer = make_layer()
    q, k, v = tokens(length + 1)
    layer.attend(q[..., :length, :], k[..., :length, :], v[..., :length, :], LOGITS)
    store = layer.store
    assert store.lengths == [length]
    assert store.quantized(0) == length // PAGE_SIZE * PAGE_SIZE
    assert store.num_recent(0) == length % PAGE_SIZE
    step = layer.attend(q[..., length:, :], k[..., length:, :], v[..., length:, :], LOGITS)
    assert torch.isfinite(step).all()


# --- Attention


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 40, 150])
def test_bf16_recipe_is_plain_attention(window, softcap):
    q, k, v = tokens(310)
    logits = LogitRule(0.2, softcap)
    expected = dense(q, k, v, window, logits)
    for sizes in ([120, *[1] * 190], [200, 1, 2, 3, 4, 8, 92], [100, 100, 110], [1, 2, 307]):
        output = steps(make_layer("bf16", window), q, k, v, sizes, logits).double()
        first = sizes[0]
        torch.testing.assert_close(output[..., :first, :], expected[..., :first, :], atol=1e-5, rtol=1e-5)
        # P in fp16 against pages.
        torch.testing.assert_close(output[..., first:, :], expected[..., first:, :], atol=2e-3, rtol=2e-3)


def test_fp32_prefill_is_exact_and_cached_tokens_are_rounded():
    q, k, v = tokens(101)
    k, v = k * 1.001, v * 1.001
    output = steps(make_layer("bf16"), q, k, v, [100, 1]).double()
    torch.testing.assert_close(output[..., :100, :], dense(q, k, v)[..., :100, :], atol=1e-5, rtol=1e-5)
    expected = dense(q, k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(output[..., 100:, :], expected[..., 100:, :], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*preset_names(), "bitdecoding-nvfp4-w16", "bitdecoding-mxfp4-plus-w16"])
def test_steps_equal_the_teacher_forced_view(name):
    """An independent implementation: all new tokens at once, each over its own pages."""
    prompt, new = 250, 10
    q, k, v = tokens(prompt + new, rows=2)
    layer = make_layer(name)
    output = steps(layer, q, k, v, [prompt, *[1] * new])[..., prompt:, :]
    k16, v16 = k.bfloat16(), v.bfloat16()
    view = DecodeView(
        make_codec(name), k16[..., :prompt, :], v16[..., :prompt, :], k[..., prompt:, :], v[..., prompt:, :], None
    )
    expected = view.attend(q[..., prompt:, :].unflatten(1, (HEADS, GROUP)), LOGITS).flatten(1, 2)
    # Another order of sums may move a 16-bit P to its neighbour.
    torch.testing.assert_close(output, expected, atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("name", ["bitdecoding-nvfp4-w16", "bitdecoding-nvfp4-plus-w16", "fp8"])
def test_one_step_is_softmax_over_dequantized_tokens(name, window):
    """Everything by hand: dequantize pages, put sink and recent tokens in their places, one fp64 softmax."""
    length = 300
    q, k, v = tokens(length + 1)
    codec = make_codec(name)
    cut = [x.bfloat16()[0, :, :256].unflatten(1, (2, PAGE_SIZE)).transpose(0, 1) for x in (k, v)]
    encoded = codec.encode_keys(cut[0], torch.tensor([True, False]))
    keys = codec.decode_keys(encoded)
    if "mean" in encoded:
        keys = keys + encoded["mean"].float().unsqueeze(-2)
    mean = 0 if codec.key_mean is None else codec.key_mean[:, None]
    keys = codec.unrotate(keys).transpose(0, 1).flatten(1, 2) + mean
    values = codec.decode_values(codec.encode_values(cut[1])).transpose(0, 1).flatten(1, 2)
    sink = codec.recipe.sink_tokens
    all_keys, all_values = k.bfloat16().float(), v.bfloat16().float()
    all_keys[0, :, sink:256], all_values[0, :, sink:256] = keys[:, sink:], values[:, sink:]

    layer = make_layer(name, window)
    output = steps(layer, q, k, v, [length, 1])[..., -1:, :]
    padded = torch.zeros(1, HEADS * GROUP, length + 1, DIM)
    padded[..., -1:, :] = q[..., -1:, :]
    expected = dense(padded, all_keys, all_values, window)[..., -1:, :]
    torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=2e-3)
    plain = dense(padded, k, v, window)[..., -1:, :]
    assert (output - plain).abs().max() > 4e-3  # the quantized tokens were read


def test_a_full_page_is_read_in_16_bits_in_its_own_step():
    q, k, v = tokens(132)
    output = steps(make_layer("native-nvfp4-plain"), q, k, v, [126, 4, 2])
    expected = dense(q, k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(output[..., 126:130, :].double(), expected[..., 126:130, :], atol=1e-4, rtol=1e-4)
    assert (output[..., 130:, :] - expected[..., 130:, :]).abs().max() > 1e-2


def test_prefill_chunks_read_pages_with_16_bit_arithmetic():
    q, k, v = tokens(300)
    native = steps(make_layer("bitdecoding-nvfp4"), q, k, v, [200, 9, 91])
    w16 = steps(make_layer("bitdecoding-nvfp4-w16"), q, k, v, [200, 9, 91])
    torch.testing.assert_close(native, w16)
    short = steps(make_layer("bitdecoding-nvfp4"), q, k, v, [200, 8])[..., 200:, :]
    assert (short - native[..., 200:208, :]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["bitdecoding-nvfp4-plus", "bf16"])
@pytest.mark.parametrize("window", [None, 40, 150])
@pytest.mark.parametrize("sizes", [[200, *[1] * 70], [60, 2, 70, 1, 1, 136]])
def test_padded_rows_equal_single_rows(name, window, sizes):
    """Also where a whole chunk of a row is padding."""
    padding = [0, 71, 200]
    q, k, v = tokens(270, rows=3)
    layer = make_layer(name, window)
    singles = [make_layer(name, window) for _ in padding]
    for start, size in zip(itertools.accumulate([0, *sizes]), sizes, strict=False):
        new = [min(max(pad - start, 0), size) for pad in padding]
        output = layer.attend(*(x[..., start : start + size, :] for x in (q, k, v)), LOGITS, new)
        assert torch.isfinite(output).all()
        for row, pad in enumerate(new):
            if pad < size:
                real = [x[row : row + 1, :, start + pad : start + size] for x in (q, k, v)]
                expected = singles[row].attend(*real, LOGITS)
                torch.testing.assert_close(output[row : row + 1, :, pad:], expected, atol=3e-4, rtol=1e-3)
    assert layer.store.lengths == [270, 199, 70]


def test_limits_on_memory_do_not_change_results(monkeypatch):
    q, k, v = tokens(300, rows=3)
    sizes = [250, 1, 1, 40, 8]
    expected = steps(make_layer("bitdecoding-nvfp4"), q, k, v, sizes)
    for limit in ("_DECODED_ELEMENTS", "_SCORE_ELEMENTS", "_ENCODED_AT_ONCE"):
        monkeypatch.setattr(paged_module, limit, 1)
    torch.testing.assert_close(steps(make_layer("bitdecoding-nvfp4"), q, k, v, sizes), expected, atol=1e-5, rtol=1e-5)


def test_16_bit_dtype_of_the_model_is_kept():
    q, k, v = (x.half() for x in tokens(200))
    layer = PagedFP4Cache(get_recipe("bf16"), 1, HEADS, DIM, dtype=torch.float16).layers[0]
    output = steps(layer, q, k, v, [150, *[1] * 50])
    assert output.dtype == layer.store.recent_keys.dtype == layer.store.pool.keys["values"].dtype == torch.float16
    torch.testing.assert_close(output.double(), dense(q, k, v), atol=4e-3, rtol=4e-3)


# --- Rows


def test_selected_rows_share_pages_and_go_separate_ways():
    q, k, v = tokens(300, rows=2)
    layer = make_layer()
    steps(layer, q[..., :260, :], k[..., :260, :], v[..., :260, :], [260])
    layer.store.select_rows([1, 0, 1])
    assert layer.store.lengths == [260] * 3
    assert layer.store.pool.num_used == 4
    order = [1, 0, 1]
    tail = [x[order][..., 260:, :].clone() for x in (q, k, v)]
    tail[1][2] += 0.5
    output = torch.cat([layer.attend(*(x[..., i : i + 1, :] for x in tail), LOGITS) for i in range(40)], -2)
    single = make_layer()
    for row in range(3):
        single.store.free()
        args = [
            torch.cat((x[order[row]][None, :, :260], t[row : row + 1]), -2)
            for x, t in zip((q, k, v), tail, strict=True)
        ]
        expected = steps(single, *args, [260, *[1] * 40])[..., 260:, :]
        torch.testing.assert_close(output[row : row + 1], expected, atol=5e-5, rtol=1e-4)
    layer.store.select_rows([1])
    assert layer.store.pool.num_used == 2


def test_pages_out_of_the_window_are_given_back():
    q, k, v = tokens(1000)
    layer = make_layer("bitdecoding-nvfp4", window=200)
    output = steps(layer, q, k, v, [600, *[1] * 400])
    assert layer.store.pool.num_used <= 3
    assert layer.store.pool.capacity <= 6
    assert layer.store.table.tensor()[0, :6].tolist() == [BlockTable.GONE] * 6
    # The same as when every page is still there.
    view = DecodeView(
        make_codec("bitdecoding-nvfp4"),
        *(x[..., :600, :].bfloat16() for x in (k, v)),
        *(x[..., 600:, :] for x in (k, v)),
        200,
    )
    expected = view.attend(q[..., 600:, :].unflatten(1, (HEADS, GROUP)), LOGITS).flatten(1, 2)
    torch.testing.assert_close(output[..., 600:, :], expected, atol=5e-5, rtol=1e-4)


def test_append_equals_attend_without_output():
    q, k, v = tokens(270, rows=2)
    a, b = make_layer(), make_layer()
    steps(a, q, k, v, [269], padding=[0, 30])
    b.append(k[..., :269, :], v[..., :269, :], [0, 30])
    step = [x[..., 269:, :] for x in (q, k, v)]
    assert torch.equal(a.attend(*step, LOGITS), b.attend(*step, LOGITS))


def test_free_starts_over_with_the_same_memory():
    q, k, v = tokens(300, rows=2)
    layer = make_layer()
    first = steps(layer, q, k, v, [280, *[1] * 20])
    capacity = layer.store.pool.capacity
    layer.store.free()
    assert layer.store.pool.num_used == 0 and layer.store.num_rows == 0
    assert torch.equal(steps(layer, q, k, v, [280, *[1] * 20]), first)
    assert layer.store.pool.capacity == capacity


def test_cache_of_several_layers():
    cache = PagedFP4Cache(get_recipe("bitdecoding-nvfp4"), 3, HEADS, DIM, calibration(3), windows=[None, 64, None])
    q, k, v = tokens(140, rows=2)
    for layer in cache.layers:
        layer.attend(q, k, v, LOGITS)
    assert cache.lengths == [140, 140]
    cache.select_rows([1])
    assert cache.lengths == [140]
    cache.free()
    assert cache.lengths == [] and cache.memory().used == 0


# --- Memory


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("bitdecoding-nvfp4", 2 * 72),
        ("bitdecoding-nvfp4-plus", 2 * 72 + 2),
        ("bitdecoding-mxfp4", 2 * 68),
        ("bf16", 2 * 256),
        ("fp8", 2 * 128),
    ],
)
def test_bytes_of_a_token(name, token_bytes):
    layer = make_layer(name, dim=128)
    _, k, v = tokens(3 * PAGE_SIZE + 10, dim=128)
    layer.append(k, v)
    memory = layer.store.memory()
    assert memory.pages_used == 3 * PAGE_SIZE * HEADS * token_bytes
    assert memory.tokens == 394
    assert memory.bf16 == 394 * HEADS * 2 * 256
    assert memory.recent_used == 10 * HEADS * 2 * 256
    assert memory.sink_used == layer.store.sink_tokens * HEADS * 2 * 256 == memory.sink_allocated
    assert memory.recent_allocated == PAGE_SIZE * HEADS * 2 * 256
    assert memory.allocated >= memory.used
    assert memory.bytes_per_token == memory.used / 394


def test_memory_of_windows_and_models():
    layer = make_layer("bitdecoding-nvfp4", window=100)
    layer.append(*tokens(300)[1:])
    assert layer.store.memory().bf16 == 100 * HEADS * 2 * DIM * 2
    total = CacheMemory.of_layers([layer.store.memory()] * 3)
    assert (total.tokens, total.used) == (300, 3 * layer.store.memory().used)
    assert "300 tokens" in str(total)
    assert CacheMemory().bytes_per_token == 0 and "0 tokens" in str(CacheMemory())


# --- Errors


@pytest.mark.parametrize("which", ["queries", "keys", "values"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_refused_by_name_and_changes_nothing(which, bad):
    cache = PagedFP4Cache(get_recipe("bitdecoding-nvfp4"), 2, HEADS, DIM, calibration(2))
    layer = cache.layers[1]
    args = dict(zip(("queries", "keys", "values"), tokens(5), strict=True))
    layer.attend(*args.values(), LOGITS)
    args[which][0, 1, 2, 3] = bad
    with pytest.raises(InvalidInputError, match=f"layer 1 {which}: 1 of"):
        layer.attend(*args.values(), LOGITS)
    assert layer.store.lengths == [5]


def test_wrong_shapes_and_padding_are_refused():
    layer = make_layer()
    q, k, v = tokens(5, rows=2)
    layer.attend(q, k, v, LOGITS, [0, 5])
    with pytest.raises(InvalidInputError, match="free the cache"):
        layer.attend(q[:1], k[:1], v[:1], LOGITS)
    with pytest.raises(InvalidInputError, match="queries"):
        layer.attend(q[..., :2, :], k, v, LOGITS)
    with pytest.raises(InvalidInputError, match="padding"):
        layer.attend(q, k, v, LOGITS, [1, 0])
    with pytest.raises(InvalidInputError, match="padding"):
        layer.attend(q, k, v, LOGITS, [0])
    with pytest.raises(InvalidInputError, match="KV heads"):
        layer.append(k[:, :1], v[:, :1])
    with pytest.raises(InvalidInputError, match="windows"):
        PagedFP4Cache(get_recipe("bf16"), 2, HEADS, DIM, windows=[None])


def test_calibrations_and_head_dims_are_checked():
    recipe = get_recipe("bitdecoding-nvfp4")
    with pytest.raises(CalibrationError, match="needs one"):
        PagedFP4Cache(recipe, 1, HEADS, DIM)
    with pytest.raises(CalibrationError, match="2 layers"):
        PagedFP4Cache(recipe, 1, HEADS, DIM, calibration(2))
    with pytest.raises(CalibrationError, match="head_dim"):
        PagedFP4Cache(recipe, 1, HEADS, 64, calibration(1))
    with pytest.raises(UnsupportedError, match="head_dim"):
        PagedFP4Cache(get_recipe("native-nvfp4-plain"), 1, HEADS, 24)


@pytest.mark.parametrize(("which", "what"), [(1, "keys"), (2, "values")])
def test_flushed_blocks_are_said_once(monkeypatch, which, what):
    """A zero block is no loss; a non-zero one whose scale rounds to 0 is."""
    monkeypatch.setattr(TorchBackend, "_reported", set())
    data = list(tokens(2 * PAGE_SIZE))
    data[which][:, :, 16:32, 16:32] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_layer("native-nvfp4-plain").append(*data[1:])
    data[which][0, 0, 16:32, 16:32] = 2.0**-9
    with pytest.warns(UserWarning, match=f"layer 0: 16 of .* blocks of {what} are below NVFP4's range"):
        make_layer("native-nvfp4-plain").append(*data[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_layer("native-nvfp4-plain").append(*data[1:])


@pytest.mark.parametrize("which", [1, 2])
def test_saturation_is_said_once(monkeypatch, which):
    monkeypatch.setattr(TorchBackend, "_reported", set())
    data = list(tokens(2 * PAGE_SIZE))
    data[which][0, 0, 5, 7] = 2600 if which == 2 else 460  # near the largest scale, but within range
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_layer("native-nvfp4-plain").append(*data[1:])
    data[which][0, 0, 5, 7] = 3000
    with pytest.warns(UserWarning, match="layer 0: (keys|values) reach 3008, NVFP4 saturates"):
        make_layer("native-nvfp4-plain").append(*data[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_layer("native-nvfp4-plain").append(*data[1:])
