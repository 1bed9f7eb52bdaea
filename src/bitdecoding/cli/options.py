"""Arguments and options that several commands share, and what they stand for."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitdecoding.errors import InvalidInputError

if TYPE_CHECKING:
    from bitdecoding.models import LoadedModel
    from bitdecoding.recipe import Recipe

__all__ = [
    "AllowMismatch",
    "CalibrationChoice",
    "Device",
    "Dtype",
    "Model",
    "check_output",
    "check_outputs_folder",
    "open_model",
    "parse_recipe",
    "read_text",
]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The alias smollm2-135m-instruct, a folder in Transformers' format, a .gguf file or a hub id.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1.", show_default="cuda if there is one"),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="float16, bfloat16, float32, or auto: the checkpoint's own."),
]
CalibrationChoice = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE|none",
        help="A file of `bitdecoding calibrate`. Without this option the calibration of this model in the cache folder "
        "is used, and computed there once if need be. 'none' switches off what needs one.",
        show_default=False,
    ),
]
AllowMismatch = Annotated[
    bool,
    typer.Option("--allow-mismatch", help="Take a calibration of another model or revision if its shape fits."),
]


def open_model(source: str, device: str | None, dtype: str) -> "LoadedModel":
    """Load the model that a user named."""
    import torch
    from transformers.utils import logging

    from bitdecoding.models import load_model

    logging.set_verbosity_error()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_model(source, device=device, dtype=dtype)


def parse_recipe(text: str) -> "Recipe":
    """The recipe of a preset's name or of a JSON file."""
    from bitdecoding.recipe import Recipe, get_recipe

    if text.endswith(".json") or Path(text).is_file():
        content = read_text(text, "recipe")
        try:
            return Recipe.from_json(content)
        except InvalidInputError as error:
            raise InvalidInputError(f"{text}: {error}") from None
    return get_recipe(text)


def read_text(path: str | Path, what: str) -> str:
    """The text of a file, or of standard input for ``-``.

    Args:
        path: the file.
        what: the argument that names it, for messages.

    Raises:
        InvalidInputError: a missing or unreadable file, or one that is not UTF-8.
    """
    try:
        return sys.stdin.read() if str(path) == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError(f"{what}: {path} is not UTF-8 text") from None
    except OSError as error:
        raise InvalidInputError(f"{what}: cannot read {path} ({error.strerror})") from None


def check_output(path: Path | None, what: str) -> None:
    """Refuse a file that cannot be written, before anything is computed for it."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidInputError(f"{what}: {path} is a folder; name a file")
    check_outputs_folder(path.parent, what)


def check_outputs_folder(folder: Path | None, what: str) -> None:
    """Make a folder for results, before anything is computed for it."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"{what}: cannot make the folder {folder} ({error.strerror})") from None
