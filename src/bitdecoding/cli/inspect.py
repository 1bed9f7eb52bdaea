"""`bitdecoding inspect`: what makes a model hard for a 4-bit cache."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitdecoding.cli.calibrations import choose_calibration
from bitdecoding.cli.console import note, print_table, write_json
from bitdecoding.cli.options import (
    AllowMismatch,
    CalibrationChoice,
    Device,
    Dtype,
    Model,
    check_output,
    check_outputs_folder,
    open_model,
    parse_recipe,
    read_text,
)

if TYPE_CHECKING:
    from bitdecoding.evaluation.inspection import LayerInspection
    from bitdecoding.models import LoadedModel

__all__ = ["inspect"]

_HEADER = (
    "layer",
    "keys: max/rms",
    "smoothed",
    "rotated",
    "blocks lost: plain",
    "blocks lost: recipe",
    "probability lost: plain",
    "probability lost: recipe",
)


def inspect(
    model: Model,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The text to look at.", show_default="the model's own, for built-in prompts"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text, at most; the last 64 are the queries.")
    ] = 2048,
    recipe: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="An NVFP4 recipe with FP4 probabilities: a preset or a JSON file.")
    ] = "bitdecoding-nvfp4",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to a file.", show_default=False)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write charts as PNG files; needs matplotlib.", show_default=False),
    ] = None,
    calibration: CalibrationChoice = None,
    allow_mismatch: AllowMismatch = False,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Show, layer by layer, the outliers of the keys and the probabilities that underflow.

    max/rms is the largest magnitude over the root mean square of each block of 16 channels of a key, averaged: 1 if all
    channels are alike, 4 if one has it all. 'smoothed' is less the calibrated key mean, 'rotated' that and rotated.
    Blocks lost are the blocks of 16 probabilities whose scale rounds to 0, of all blocks in quantized pages;
    probability lost is the share of a query's attention in them. 'plain' maps block maxima to 6 with c = 1.
    """
    from bitdecoding.evaluation.inspection import inspect_model

    chosen = parse_recipe(recipe)
    check_output(json_file, "json")
    if plots is not None:
        from bitdecoding.evaluation.plots import require_matplotlib

        require_matplotlib()
        check_outputs_folder(plots, "plots")
    content = None if text is None else read_text(text, "text")
    loaded = open_model(model, device, dtype)
    statistics, (chosen,) = choose_calibration(loaded, calibration, [chosen], allow_mismatch=allow_mismatch)
    ids = _token_ids(loaded, content, tokens)
    layers = inspect_model(loaded, ids, chosen, statistics)
    print_table(_HEADER, [*(_row(str(layer.layer), [layer]) for layer in layers), _row("mean", layers)])
    if json_file is not None:
        write_json(
            {
                "model_id": loaded.model_id,
                "revision": loaded.revision,
                "recipe": chosen.model_dump(mode="json"),
                "tokens": len(ids),
                "layers": [_to_json(layer) for layer in layers],
            },
            json_file,
        )
    if plots is not None:
        from bitdecoding.evaluation.plots import save_plots

        for file in save_plots(layers, plots, f"{loaded.model_id}, {chosen.name}"):
            note(f"wrote {file}")


def _token_ids(loaded: "LoadedModel", text: str | None, tokens: int) -> list[int]:
    from bitdecoding.calibration import CALIBRATION_PROMPTS
    from bitdecoding.calibration.compute import NEW_TOKENS, calibration_tokens
    from bitdecoding.models import model_shape

    tokens = min(tokens, model_shape(loaded.model.config).max_context)
    if text is not None:
        ids: list[int] = loaded.tokenizer(text).input_ids
        return ids[:tokens]
    note("the model writes the text")
    return calibration_tokens(loaded, CALIBRATION_PROMPTS, NEW_TOKENS)[:tokens].tolist()


def _row(name: str, layers: "Sequence[LayerInspection]") -> list[str]:
    """Means over layers."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return [
        name,
        f"{mean([layer.raw_keys for layer in layers]):.3f}",
        f"{mean([layer.smoothed_keys for layer in layers]):.3f}",
        f"{mean([layer.rotated_keys for layer in layers]):.3f}",
        f"{mean([layer.plain.blocks for layer in layers]):.2%}",
        f"{mean([layer.recipe.blocks for layer in layers]):.2%}",
        f"{mean([layer.plain.mass for layer in layers]):.2e}",
        f"{mean([layer.recipe.mass for layer in layers]):.2e}",
    ]


def _to_json(layer: "LayerInspection") -> dict[str, Any]:
    return {**asdict(layer), "plain": layer.plain._asdict(), "recipe": layer.recipe._asdict()}
