"""The decode kernel's real source, built for the CPU, against the reference, with poison in every place that it must
not read."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from decode_cases import Case, Cut, Spec, check_append, check_result, make_case, shape_of, workspace_for
from host_kernels import HostKernel, needs_compiler

from bitdecoding.kernels import buffers as buffers_module
from bitdecoding.kernels import decode as decode_module
from bitdecoding.kernels.decode import DecodeWorkspace, decode
from bitdecoding.kernels.decode_config import DecodeConfig, DecodeShape

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]

LENGTHS = [0, 1, 17, 129, 300, 520]
CONFIG = DecodeConfig(pairs=2, slots=4, min_ctas=1)
NVFP4, MXFP4 = "bitdecoding-nvfp4", "bitdecoding-mxfp4"
CENTERED = {NVFP4: "bitdecoding-nvfp4-page-centered", MXFP4: "bitdecoding-mxfp4-plus"}

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a case on so many CTAs, its threads in an order that the seed chooses."""

    def launch(
        case: Case,
        config: DecodeConfig = CONFIG,
        *,
        ctas: int = 4,
        seed: int = 0,
        workspace: DecodeWorkspace | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def kernel(shape: DecodeShape, config: DecodeConfig) -> HostKernel:
            built = HostKernel("decode.cu", "decode", config.defines(shape))
            built.seed = seed
            return built

        device = SimpleNamespace(multi_processor_count=ctas)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        monkeypatch.setattr(decode_module, "_multiprocessors", lambda _: ctas)
        monkeypatch.setattr(decode_module, "_kernel", kernel)
        workspace = workspace or workspace_for(case)
        workspace.output.fill_(torch.nan)
        workspace.stats.fill_(torch.nan)
        output = torch.full_like(case.query, torch.nan)
        lse = torch.full(output.shape[:3], torch.nan)
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

    monkeypatch.setattr(buffers_module, "require_cuda", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return launch


def check(run: Run, spec: Spec, config: DecodeConfig = CONFIG, *, ctas: int = 4, seeds: int = 2) -> None:
    """Results are right, and the same whichever thread and CTA comes first."""
    case = make_case(spec, "cpu")
    output, lse = run(case, config, ctas=ctas)
    check_result(case, output, lse, Cut(ctas, config.pairs, shape_of(case).columns))
    for seed in range(1, seeds):
        again = make_case(spec, "cpu")  # a run appends to the tail
        results = run(again, config, ctas=ctas, seed=seed)
        assert torch.equal(results[0], output) and torch.equal(results[1], lse)
        check_append(again)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("recipe", [NVFP4, MXFP4])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("group", "tokens"), [(4, 1), (9, 3)])
def test_lengths(run: Run, native: bool, recipe: str, centered: bool, group: int, tokens: int) -> None:
    spec = Spec(LENGTHS, CENTERED[recipe] if centered else recipe, native, 64, group=group, tokens=tokens)
    check(run, spec, ctas=3 + tokens)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("window", [1, 16, 100, 129, 500])
def test_windows(run: Run, native: bool, window: int) -> None:
    for tokens in (1, 3):
        check(run, Spec(LENGTHS, native=native, head_dim=64, tokens=tokens, window=window))


@pytest.mark.parametrize(("native", "recipe"), [(False, CENTERED[NVFP4]), (True, NVFP4)])
def test_softcap(run: Run, native: bool, recipe: str) -> None:
    check(run, Spec(LENGTHS, recipe, native, 64, softcap=20.0, q_scale=4.0))


@pytest.mark.parametrize("native", [False, True])
def test_without_sink_at_hand(run: Run, native: bool) -> None:
    check(run, Spec(LENGTHS, native=native, head_dim=64, sink_at_hand=False))


@pytest.mark.parametrize("native", [False, True])
def test_fp16(run: Run, native: bool) -> None:
    check(run, Spec(LENGTHS, native=native, head_dim=64, dtype=torch.float16, table_dtype=torch.int64))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("granule", [2, 5])
def test_fixed_splits(run: Run, native: bool, granule: int) -> None:
    check(run, Spec(LENGTHS, native=native, head_dim=64, granule=granule))


@pytest.mark.parametrize(
    "config",
    [DecodeConfig(1, 3, 1, 1), DecodeConfig(2, 2, 1, 4), DecodeConfig(3, 3, 1)],
    ids=str,
)
def test_other_configurations(run: Run, config: DecodeConfig) -> None:
    check(run, Spec(LENGTHS, CENTERED[NVFP4], head_dim=64), config, ctas=2, seeds=5)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_longer_heads(run: Run, head_dim: int) -> None:
    check(run, Spec([17, 300], native=head_dim == 256, head_dim=head_dim))


def test_many_rows(run: Run) -> None:
    """More than the loader reads at once, and more CTAs than some rows have work."""
    lengths = [n * 37 % 190 * (n % 4 > 0) for n in range(75)]
    for ctas in (1, 7, 500):
        check(run, Spec(lengths, head_dim=64, kv_heads=1), ctas=ctas, seeds=1)


def test_one_long_row(run: Run) -> None:
    """Parts of one tile on every CTA, and more block ids than a warp reads at once."""
    for ctas in (1, 5, 40):
        check(run, Spec([128 * 70 + 5], head_dim=64, kv_heads=1), ctas=ctas, seeds=1)


def test_a_workspace_serves_launch_after_launch(run: Run) -> None:
    large = make_case(Spec(LENGTHS, head_dim=64), "cpu")
    run(large)
    workspace = workspace_for(large)
    for lengths in ([520, 0, 129], [1, 300], LENGTHS):
        case = make_case(Spec(lengths, head_dim=64), "cpu")
        output, lse = run(case, workspace=workspace)
        check_result(case, output, lse, Cut(4, CONFIG.pairs, shape_of(case).columns))


@pytest.mark.parametrize("native", [False, True])
def test_nan_stays_in_its_row(run: Run, native: bool) -> None:
    spec = Spec([300, 300, 300], native=native, head_dim=64)
    expected, expected_lse = run(make_case(spec, "cpu"))
    case = make_case(spec, "cpu")
    case.query[1, 0, 3] = torch.nan
    output, lse = run(case)
    bad = torch.zeros(lse.shape, dtype=torch.bool)
    bad[1, 0, 3] = True
    assert bool(torch.isnan(output[bad]).all()) and bool(torch.isnan(lse[bad]).all())
    assert torch.equal(output[~bad], expected[~bad]) and torch.equal(lse[~bad], expected_lse[~bad])
