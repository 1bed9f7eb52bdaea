"""Measure every accuracy table of docs/accuracy.md on one model and write them to one JSON file.

    python benchmarks/accuracy.py MODEL --output benchmarks/results/accuracy-NAME.json [--device cuda]

Prompts are the texts of benchmarks/texts; the model continues each greedily, and every recipe is teacher-forced on
these trajectories. Runs resume: cells already done are kept in OUTPUT's neighbour `.cells.json`.
"""

import argparse
import datetime
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import Progress

from bitdecoding import __version__
from bitdecoding.calibration.compute import calibrate
from bitdecoding.calibration.storage import check_calibration, load_calibration, save_calibration
from bitdecoding.evaluation import TeacherForcing, generate_trajectory, load_trajectories, run_kl, save_trajectories
from bitdecoding.evaluation.logit_error import logit_error
from bitdecoding.evaluation.runner import KLReport, hadamard_draws
from bitdecoding.models import LoadedModel, load_model
from bitdecoding.numerics.blocks import ScaleRule
from bitdecoding.recipe import KeyRounding, QueryFormat, QuerySmoothing, Recipe, Rotation, get_recipe

TEXTS = Path(__file__).parent / "texts"


def leave_one_out(fmt: str) -> list[Recipe]:
    """The paper's recipe in one format and its copies with one technique less."""
    base = get_recipe(f"bitdecoding-{fmt}")
    blocks = base.kv_format.blocks
    assert blocks is not None
    plain_p: dict[str, Any] = (
        {"probability_rule": "max6", "probability_c": 1.0} if fmt == "nvfp4" else {"probability_rule": "ocp"}
    )
    changes: dict[str, dict[str, Any]] = {
        "dual query": {"query_format": QueryFormat.FP4},
        "probability scaling": plain_p,
        "key smoothing": {"key_smoothing": False},
        "rotation": {"rotation": Rotation.NONE},
        "smoothing and rotation": {"key_smoothing": False, "rotation": Rotation.NONE},
        "scale search": {"key_rule": blocks.standard_rule},
        "sink": {"sink_tokens": 0},
    }
    return [base, *(base.replace(name=f"{base.name} without {what}", **fields) for what, fields in changes.items())]


def recipes() -> list[Recipe]:
    """All rows: leave-one-out tables, plus presets, 16-bit arithmetic, peers and ablations."""
    rows: list[Recipe] = []
    for fmt in ("nvfp4", "mxfp4"):
        rows += leave_one_out(fmt)
        rows += [get_recipe(f"bitdecoding-{fmt}-{what}") for what in ("page-centered", "ldlq", "plus")]
        rows += [get_recipe(f"bitdecoding-{fmt}-w16"), get_recipe(f"bitdecoding-{fmt}-plus-w16")]
        rows += [get_recipe(f"native-{fmt}-plain")]
    rows += [get_recipe(n) for n in ("fp8", "trtllm-nvfp4", "saw-int4", "turboquant-4bit")]
    rows += [get_recipe(n) for n in ("nvfp4-query-token-mean", "nvfp4-query-gqa-mean", "nvfp4-two-level-p")]
    rows.append(
        get_recipe("bitdecoding-nvfp4").replace(
            name="bitdecoding-nvfp4, default tau 21/1024", probability_tau=21 / 1024
        )
    )
    return rows


def query_formats() -> list[Recipe]:
    """Rows of the query-format table (paper Table 6)."""
    base = get_recipe("bitdecoding-nvfp4")
    rows = [
        base.replace(name="single NVFP4 query", query_format=QueryFormat.FP4),
        base.replace(name="FP8 query", query_format=QueryFormat.FP8),
        get_recipe("nvfp4-query-token-mean"),
        get_recipe("nvfp4-query-gqa-mean"),
        base.replace(name="dual NVFP4 query"),
        base.replace(name="16-bit query", query_format=QueryFormat.BITS16),
    ]
    mx = get_recipe("bitdecoding-mxfp4")
    rows.append(mx.replace(name="single MXFP4 query", query_format=QueryFormat.FP4))
    rows.append(mx.replace(name="dual MXFP4 query"))
    assert all(r.query_smoothing in QuerySmoothing and r.key_rounding is KeyRounding.NEAREST for r in rows)
    assert base.effective_key_rule is ScaleRule.FOUR_OVER_SIX
    return rows


def make_trajectories(loaded: LoadedModel, path: Path, steps: int, longest: int) -> list[Any]:
    if not path.exists():
        trajectories = []
        for text in sorted(TEXTS.glob("*.txt")):
            ids = loaded.tokenizer(text.read_text()).input_ids[:longest]
            trajectories.append(generate_trajectory(loaded, text.stem, ids, steps))
            print(f"{text.stem}: {len(ids)} prompt tokens", file=sys.stderr)
        save_trajectories(trajectories, path, loaded)
    return load_trajectories(path, loaded)


def query_table(loaded: LoadedModel, calibration: Any, trajectories: list[Any], draws: int) -> list[dict[str, Any]]:
    forcing = TeacherForcing(loaded, calibration)
    rows = []
    for recipe in query_formats():
        errors = [logit_error(forcing, t, v) for t in trajectories for v in hadamard_draws(recipe, draws)]
        total = sum(e.total for e in errors) / len(errors)
        keys_only = sum(e.keys_only for e in errors) / len(errors)
        rows.append(
            {
                "query": recipe.name,
                "logit_mse": total,
                "logit_mse_keys_only": keys_only,
                "query_share": 1 - keys_only / total,
                "logit_mean_square": sum(e.signal for e in errors) / len(errors),
            }
        )
    return rows


def comparisons(report: KLReport) -> list[dict[str, Any]]:
    """Each recipe against the preset it varies, and presets against their peers."""
    pairs = [(s.name, s.name.split(" without ")[0]) for s in report.summaries if " without " in s.name]
    for fmt in ("nvfp4", "mxfp4"):
        base = f"bitdecoding-{fmt}"
        pairs += [(f"{base}-{what}", base) for what in ("page-centered", "ldlq", "plus", "w16")]
        pairs += [(f"{base}-plus-w16", f"{base}-w16"), (f"native-{fmt}-plain", base)]
    nvfp4 = "bitdecoding-nvfp4"
    pairs += [(s.name, nvfp4) for s in report.summaries if s.name.startswith(("nvfp4-", f"{nvfp4}, "))]
    pairs += [(n, nvfp4) for n in ("fp8", "trtllm-nvfp4", "saw-int4", "turboquant-4bit", "bitdecoding-mxfp4")]
    measured = {s.name for s in report.summaries}
    return [{"recipe": a, "against": b, **vars(report.compare(a, b))} for a, b in pairs if {a, b} <= measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--longest", type=int, default=3900, help="prompt tokens at most")
    parser.add_argument("--draws", type=int, default=2, help="random Hadamard draws averaged; 0: the plain matrix")
    parser.add_argument("--only", default="", help="regular expression that names of recipes must match")
    args = parser.parse_args()
    loaded = load_model(args.model, dtype=args.dtype, device=args.device)
    stem = args.output.with_suffix("")
    trajectories = make_trajectories(loaded, Path(f"{stem}.trajectories.json"), args.steps, args.longest)
    calibration_path = Path(f"{stem}.calibration.safetensors")
    if not calibration_path.exists():
        save_calibration(calibrate(loaded, progress=lambda stage: print(stage, file=sys.stderr)), calibration_path)
    calibration = load_calibration(calibration_path)
    check_calibration(calibration, loaded)
    rows = [recipe for recipe in recipes() if re.search(args.only, recipe.name)]
    with Progress() as progress:
        total = len(trajectories) * sum(len(hadamard_draws(r, args.draws)) for r in rows)
        task = progress.add_task("recipes", total=total)
        report = run_kl(
            loaded,
            trajectories,
            rows,
            calibration=calibration,
            draws=args.draws,
            results_path=f"{stem}.cells.json",
            on_cell=lambda: progress.advance(task),
        )
    result = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/accuracy.py MODEL --steps {args.steps} --draws {args.draws} "
        f"--longest {args.longest} --dtype {args.dtype} --device {args.device}"
        + (f" --only '{args.only}'" if args.only else ""),
        "model_id": loaded.model_id,
        "revision": loaded.revision,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "cpu",
        "versions": {
            "bitdecoding-fp4": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "hadamard_draws": args.draws,
        "prompt_tokens": {t.name: t.prompt_length for t in trajectories},
        "steps": args.steps,
        "calibrated_tau": calibration.tau,
        "calibration_window": calibration.metadata["window"],
        **report.to_dict(),
        "comparisons": comparisons(report),
        "query_formats": query_table(loaded, calibration, trajectories, args.draws),
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    for s in report.summaries:
        print(f"{s.name:55s} KL {s.mean_kl:.5f}  top-1 mismatch {s.mean_mismatch:.3%}")
    for row in result["comparisons"]:
        print(
            f"{row['recipe']:55s} / {row['against']:25s} ratio {row['ratio']:.3f} wins {row['wins']}/{row['count']}"
            f" t {row['t']} p {row['p_value']}"
        )
    for row in result["query_formats"]:
        print(f"{row['query']:30s} query share of logit error {row['query_share']:.3%}")


if __name__ == "__main__":
    main()
