"""`bitdecoding calibrate`: measure a model once and keep the result in a file."""

from pathlib import Path
from typing import Annotated

import typer

from bitdecoding.cli.console import note
from bitdecoding.cli.options import Device, Dtype, Model, check_output, open_model, read_text
from bitdecoding.errors import InvalidInputError

__all__ = ["calibrate"]


def calibrate(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write, safetensors.")],
    window: Annotated[
        int | None, typer.Option(help="Tokens of the prefill.", show_default="the model's context, at most 8192")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts that the model continues to get the text, one a line.",
            show_default="eight built-in ones",
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that continue each prompt.")] = 256,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Measure what the recipes need to know of a model: key means, query moments, the probability threshold.

    Takes minutes on a CPU. The text is the model's own: it continues some prompts greedily.
    """
    from bitdecoding.calibration import CALIBRATION_PROMPTS, compute
    from bitdecoding.calibration.storage import save_calibration

    if output.exists() and not force:
        raise InvalidInputError(f"output: {output} exists; --force replaces it")
    check_output(output, "output")
    prompts = CALIBRATION_PROMPTS if prompts_file is None else _prompts(prompts_file)
    loaded = open_model(model, device, dtype)
    calibration = compute.calibrate(
        loaded,
        window=window,
        prompts=prompts,
        new_tokens=new_tokens,
        progress=lambda stage: note(f"calibrating: {stage}"),
    )
    save_calibration(calibration, output)
    print(f"{output}: {calibration.num_layers} layers of {loaded.model_id}, threshold tau {calibration.tau:.6g}")


def _prompts(path: Path) -> tuple[str, ...]:
    prompts = tuple(line.strip() for line in read_text(path, "prompts-file").splitlines() if line.strip())
    if not prompts:
        raise InvalidInputError(f"prompts-file: {path} holds no prompt; write one a line")
    return prompts
