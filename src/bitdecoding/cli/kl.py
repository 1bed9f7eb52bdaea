"""`bitdecoding kl`: how far recipes are from the 16-bit cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitdecoding.cli.calibrations import choose_calibration
from bitdecoding.cli.console import note, print_markdown, print_table, progress_bars
from bitdecoding.cli.options import (
    AllowMismatch,
    CalibrationChoice,
    Device,
    Dtype,
    Model,
    check_output,
    open_model,
    parse_recipe,
    read_text,
)
from bitdecoding.errors import InvalidInputError

if TYPE_CHECKING:
    from bitdecoding.calibration import Calibration
    from bitdecoding.evaluation import KLReport, Trajectory
    from bitdecoding.models import LoadedModel
    from bitdecoding.recipe import Recipe

__all__ = ["kl"]

_RECIPES = ["bitdecoding-nvfp4", "bitdecoding-mxfp4", "trtllm-nvfp4", "fp8", "native-nvfp4-plain"]
_HEADER = ("recipe", "mean KL [nats]", "top-1 agreement", "KL ratio", "paired t", "p", "wins")


def kl(
    model: Model,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A preset of `bitdecoding info` or a JSON file; can be repeated.",
            show_default=", ".join(_RECIPES),
        ),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR|FILE",
            help="Texts whose beginnings are the prompts: a file, or all .txt files of a folder; can be repeated.",
            show_default=False,
        ),
    ] = None,
    trajectories: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON file of prompts with the model's continuations: read if it exists, else written.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text's prompt, at most.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that continue each prompt, tokens.")] = 128,
    draws: Annotated[
        int, typer.Option(min=0, help="Random Hadamard rotations averaged for each recipe; 0 is the plain one.")
    ] = 0,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="The recipe that the others are compared with.", show_default="the first"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="JSON file for the results. The same command goes on where a stopped one was; give --trajectories "
            "too, so that the prompts need not be continued again.",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
    calibration: CalibrationChoice = None,
    allow_mismatch: AllowMismatch = False,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Measure the divergence of recipes from the 16-bit cache, on the model's own continuations of texts.

    Each continuation is fed token by token under each recipe. The KL divergence of the next token's distribution is
    taken over the reference's 128 most likely tokens, in nats, and averaged over steps, then texts. Ratio, paired t
    test over texts and wins (texts with the lower KL) compare each recipe with --against.
    """
    recipes, base = _recipes(recipe or _RECIPES, against)
    check_output(output, "output")
    check_output(trajectories, "trajectories")
    files = [] if trajectories is not None and trajectories.exists() else _text_files(texts or [])
    loaded = open_model(model, device, dtype)
    for each in recipes:
        each.check_head_dim(_head_dim(loaded))
    statistics, recipes = choose_calibration(loaded, calibration, recipes, allow_mismatch=allow_mismatch)
    references = _trajectories(loaded, files, trajectories, prompt_tokens, steps)
    report = _run(loaded, references, recipes, statistics, draws, output)
    (print_markdown if markdown else print_table)(_HEADER, _rows(report, recipes[base].name))


def _recipes(names: Sequence[str], against: str | None) -> "tuple[list[Recipe], int]":
    """The recipes, with the one to compare with among them, and its index."""
    recipes = [parse_recipe(name) for name in names]
    if against is None:
        return recipes, 0
    base = parse_recipe(against)
    if base not in recipes:
        recipes.append(base)
    return recipes, recipes.index(base)


def _head_dim(loaded: "LoadedModel") -> int:
    from bitdecoding.models import model_shape

    return model_shape(loaded.model.config).head_dim


def _text_files(paths: Sequence[Path]) -> list[Path]:
    files = [file for path in paths for file in (sorted(path.glob("*.txt")) if path.is_dir() else [path])]
    if not files:
        raise InvalidInputError("texts: no .txt file given; use --texts DIR or an existing --trajectories FILE")
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"texts: names must differ, got {', '.join(names)}")
    return files


def _trajectories(
    loaded: "LoadedModel", files: Sequence[Path], path: Path | None, prompt_tokens: int, steps: int
) -> "list[Trajectory]":
    """The trajectories of the texts, or without any those of the file."""
    from bitdecoding.evaluation import generate_trajectory, load_trajectories, save_trajectories

    if path is not None and not files:
        note(f"trajectories of {path}")
        return load_trajectories(path, loaded)
    prompts = {file.stem: loaded.tokenizer(read_text(file, "texts")).input_ids[:prompt_tokens] for file in files}
    with progress_bars() as progress:
        task = progress.add_task("continuing the texts", total=steps * len(files))
        made = [
            generate_trajectory(loaded, name, ids, steps, on_token=lambda: progress.advance(task))
            for name, ids in prompts.items()
        ]
    if path is not None:
        save_trajectories(made, path, loaded)
    return made


def _run(
    loaded: "LoadedModel",
    trajectories: "Sequence[Trajectory]",
    recipes: "Sequence[Recipe]",
    calibration: "Calibration | None",
    draws: int,
    output: Path | None,
) -> "KLReport":
    from bitdecoding.evaluation import run_kl
    from bitdecoding.evaluation.runner import hadamard_draws

    with progress_bars() as progress:
        cells = len(trajectories) * sum(len(hadamard_draws(recipe, draws)) for recipe in recipes)
        task = progress.add_task("recipes on texts", total=cells)
        return run_kl(
            loaded,
            trajectories,
            recipes,
            calibration=calibration,
            draws=draws,
            results_path=output,
            on_cell=lambda: progress.advance(task),
        )


def _rows(report: "KLReport", base: str) -> list[list[str]]:
    rows = []
    for summary in report.summaries:
        row = [summary.name, f"{summary.mean_kl:.5f}", f"{1 - summary.mean_mismatch:.2%}"]
        if summary.name == base:
            rows.append([*row, "1", "", "", ""])
            continue
        pair = report.compare(summary.name, base)
        t, p = ("", "") if pair.t is None or pair.p_value is None else (f"{pair.t:.2f}", f"{pair.p_value:.2g}")
        rows.append([*row, f"{pair.ratio:.3f}", t, p, f"{pair.wins}/{pair.count}"])
    return rows
