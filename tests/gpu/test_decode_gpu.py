"""The decode kernel against the reference, with poison in every place that it must not read."""

import dataclasses

import pytest
import torch
from decode_cases import Case, Cut, Spec, check_result, dense, exact, make_case, shape_of, workspace_for

from bitdecoding.kernels.decode import DecodePlan, DecodeWorkspace, decode
from bitdecoding.kernels.decode_config import DecodeConfig, choose_config

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 15, 16, 17, 127, 128, 129, 130, 256, 257, 300, 1024, 1025, 1500, 128 * 33 + 5]


def run(case: Case, workspace: DecodeWorkspace | None = None, config: DecodeConfig | None = None, output=None):
    workspace = workspace or workspace_for(case)
    lse = torch.full(case.query.shape[:3], torch.nan, device="cuda")
    if output is None:
        output = torch.full_like(case.query, torch.nan)
    decode(
        case.query,
        case.new_keys,
        case.new_values,
        case.buffers,
        case.plan,
        workspace,
        case.logits,
        case.arithmetic,
        window=case.spec.window,
        output=output,
        lse=lse,
        config=config,
    )
    assert not workspace.arrived.any()
    return output, lse


def cut_of(case: Case, config: DecodeConfig | None = None) -> Cut:
    shape = shape_of(case)
    spec = case.spec
    tiles = len(spec.lengths) * spec.kv_heads * -(-spec.group * spec.tokens // shape.columns)
    config = config or choose_config(shape, tiles)
    ctas = torch.cuda.get_device_properties(0).multi_processor_count * config.min_ctas
    return Cut(ctas, config.pairs, shape.columns)


def check(spec: Spec, config: DecodeConfig | None = None) -> None:
    case = make_case(spec)
    output, lse = run(case, config=config)
    check_result(case, output, lse, cut_of(case, config))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4", "bitdecoding-mxfp4"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lengths(native, recipe, head_dim, dtype):
    check(Spec(LENGTHS, recipe, native, head_dim, dtype=dtype))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4-page-centered", "bitdecoding-mxfp4-plus"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_page_centered(native, recipe, head_dim):
    check(Spec(LENGTHS, recipe, native, head_dim))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 24])
def test_groups(native, group):
    check(Spec([0, 5, 129, 300, 2000], native=native, group=group, kv_heads=1 + group % 3))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("tokens", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("window", [None, 100])
def test_several_tokens(native, tokens, window):
    lengths = [0, 1, 3, 8, 17, 127, 128, 129, 131, 135, 136, 256, 260, 1030]
    check(Spec(lengths, native=native, tokens=tokens, window=window))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("window", [1, 16, 128, 129, 500, 4096])
def test_windows(native, window):
    check(Spec(LENGTHS, native=native, window=window))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4", "bitdecoding-nvfp4-page-centered"])
def test_softcap(native, recipe):
    check(Spec(LENGTHS, recipe, native=native, softcap=20.0, q_scale=4.0))


@pytest.mark.parametrize("native", [False, True])
def test_without_sink_at_hand(native):
    check(Spec(LENGTHS, native=native, sink_at_hand=False))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("granule", [2, 5, 16])
def test_fixed_splits(native, granule):
    check(Spec(LENGTHS, native=native, granule=granule))


def test_int64_tables():
    check(Spec(LENGTHS, table_dtype=torch.int64))


@pytest.mark.parametrize("native", [False, True])
def test_a_million_tokens(native):
    check(Spec([2**20, 0, 1000], native=native, head_dim=64, kv_heads=1))


def test_rows_share_pages():
    """Two requests with the same first pages read them from the same blocks."""
    case = make_case(Spec([1100, 1100], q_scale=3.0))
    table = case.plan.block_table
    first = table[0, :5].clone()
    shared = table.clone()
    shared[1, :5] = first
    plan = dataclasses.replace(case.plan, block_table=shared)
    copied = case.buffers.pages.clone()
    copied[table[1, :5].long()] = case.buffers.pages[first.long()]
    expected, _ = run(dataclasses.replace(case, buffers=dataclasses.replace(case.buffers, pages=copied)))
    # The blocks that the second row had to itself hold what must not be read
    case.buffers.pages[table[1, :5].long()] = 0xFF
    output, _ = run(dataclasses.replace(case, plan=plan))
    assert torch.equal(output, expected)


def test_large_pool():
    """Pages beyond 2^31 bytes."""
    check(Spec([300, 1000], kv_heads=8, high_blocks=2**31 // (8 * 18432) + 5))


@pytest.mark.parametrize("pairs, slots, min_ctas", [(1, 4, 2), (2, 4, 2), (3, 6, 1), (4, 8, 1)])
def test_other_configurations(pairs, slots, min_ctas):
    check(Spec(LENGTHS), DecodeConfig(pairs, slots, min_ctas))


@pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4", "bitdecoding-mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accuracy_is_that_of_16_bit_attention(recipe, dtype):
    """Error against fp64 attention on dequantized data at most twice that of torch's SDPA on the same."""
    case = make_case(Spec([129, 700, 4000], recipe, dtype=dtype))
    output, _ = run(case)
    truth = exact(case)
    for row in range(len(case.spec.lengths)):
        q, k, v, seen = (x[None] if x.dtype == torch.bool else x.to(dtype) for x in dense(case, row))
        heads = case.spec.kv_heads
        grouped = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen[None], scale=case.logits.scale
        )[0]
        peer = grouped.unflatten(1, (case.spec.group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
        assert peer.shape[1] == heads * case.spec.group
        error = (output[row].double() - truth[row]).norm()
        assert error <= 2 * (peer.double() - truth[row]).norm()


@pytest.mark.parametrize("native", [False, True])
def test_runs_agree_bit_for_bit(native):
    case = make_case(Spec([3000, 129, 128 * 300 + 7], native=native, kv_heads=4))
    first, first_lse = run(case)
    for _ in range(5):
        again, again_lse = run(case)
        assert torch.equal(first, again) and torch.equal(first_lse, again_lse)


@pytest.mark.parametrize("native", [False, True])
def test_fixed_splits_make_rows_independent(native):
    """A row alone gives what it gives in a batch, bit for bit."""
    case = make_case(Spec([3000, 0, 129, 128 * 60 + 7, 17], native=native, granule=8))
    output, lse = run(case)
    for row in range(len(case.spec.lengths)):
        one = slice(row, row + 1)
        prefix = case.plan.item_prefix
        plan = DecodePlan(
            case.plan.rows[one].contiguous(),
            torch.stack((prefix[0], prefix[row + 1] - prefix[row])).contiguous(),
            case.plan.block_table[one].contiguous(),
            8,
        )
        alone = dataclasses.replace(
            case,
            spec=dataclasses.replace(case.spec, lengths=[case.spec.lengths[row]]),
            plan=plan,
            query=case.query[one],
            new_keys=case.new_keys[one],
            new_values=case.new_values[one],
        )
        row_output, row_lse = run(alone)
        assert torch.equal(row_output[0], output[row]) and torch.equal(row_lse[0], lse[row])


def test_strides():
    """Slices of a fused QKV, and an output inside a larger tensor."""
    case = make_case(Spec([129, 700], tokens=2))
    expected, expected_lse = run(case)
    rows, tokens, q_heads, dim = case.query.shape
    heads = case.spec.kv_heads
    fused = torch.full((rows, tokens, q_heads + 2 * heads, dim), torch.nan, device="cuda", dtype=case.query.dtype)
    fused[:, :, :q_heads] = case.query
    fused[:, :, q_heads : q_heads + heads] = case.new_keys
    fused[:, :, q_heads + heads :] = case.new_values
    strided = dataclasses.replace(
        case,
        query=fused[:, :, :q_heads],
        new_keys=fused[:, :, q_heads : q_heads + heads],
        new_values=fused[:, :, q_heads + heads :],
    )
    large = torch.full((tokens, rows, q_heads + 3, dim), -7.0, device="cuda", dtype=case.query.dtype)
    output, lse = run(strided, output=large.transpose(0, 1)[:, :, 1:-2])
    assert torch.equal(output, expected) and torch.equal(lse, expected_lse)
    assert bool((large[:, :, 0] == -7).all()) and bool((large[:, :, -2:] == -7).all())


def test_nan_stays_in_its_row():
    case = make_case(Spec([300, 300, 300]))
    expected, _ = run(case)
    case.query[1, 0, 3] = torch.nan
    output, lse = run(case)
    bad = torch.zeros(output.shape[:3], dtype=torch.bool, device="cuda")
    bad[1, 0, 3] = True
    assert bool(torch.isnan(output[bad]).all()) and bool(torch.isnan(lse[bad]).all())
    assert torch.equal(output[~bad], expected[~bad])


def test_graph_replay_equals_eager():
    cases = [make_case(Spec(lengths, kv_heads=4)) for lengths in ([130, 700, 0], [5000, 20, 131], [128 * 90, 1, 300])]
    static = cases[0]
    workspace = workspace_for(cases[1])
    table = torch.zeros(3, 200, dtype=torch.int32, device="cuda")
    blocks = max(c.buffers.pages.shape[0] for c in cases)
    pages = static.buffers.pages.new_zeros((blocks, *static.buffers.pages.shape[1:]))
    buffers = dataclasses.replace(static.buffers, pages=pages)
    plan = DecodePlan(static.plan.rows.clone(), static.plan.item_prefix.clone(), table)
    captured = dataclasses.replace(
        static,
        buffers=buffers,
        plan=plan,
        query=static.query.clone(),
        new_keys=static.new_keys.clone(),
        new_values=static.new_values.clone(),
    )

    def fill(case: Case) -> None:
        pages.zero_()
        pages[: case.buffers.pages.shape[0]] = case.buffers.pages
        for target, source in zip((buffers.tail, buffers.sink), (case.buffers.tail, case.buffers.sink), strict=True):
            target.copy_(source)
        table.fill_(2147480000)
        table[:, : case.plan.block_table.shape[1]] = case.plan.block_table
        plan.rows.copy_(case.plan.rows)
        plan.item_prefix.copy_(case.plan.item_prefix)
        for name in ("query", "new_keys", "new_values"):
            getattr(captured, name).copy_(getattr(case, name))

    fill(make_case(static.spec))
    output = torch.empty_like(captured.query)

    def step() -> None:
        decode(
            captured.query, captured.new_keys, captured.new_values, buffers, plan, workspace, captured.logits,
            captured.arithmetic, output=output,
        )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in cases:
        fresh = make_case(case.spec)
        expected, _ = run(case, workspace=workspace_for(case))
        fill(fresh)
        graph.replay()
        assert torch.equal(output, expected)
