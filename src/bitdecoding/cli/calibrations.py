"""The calibration that a command works with: a file, the cached one of the model, or none."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bitdecoding.cli.console import note
from bitdecoding.errors import CalibrationError

if TYPE_CHECKING:
    from bitdecoding.calibration import Calibration
    from bitdecoding.models import LoadedModel
    from bitdecoding.recipe import Recipe

__all__ = ["cached_path", "choose_calibration", "without_calibration"]


def choose_calibration(
    loaded: "LoadedModel", choice: str | None, recipes: Sequence["Recipe"], *, allow_mismatch: bool
) -> tuple["Calibration | None", list["Recipe"]]:
    """What ``--calibration`` stands for.

    Args:
        loaded: the model.
        choice: a file, ``none``, or None for the cached one.
        recipes: that shall run.
        allow_mismatch: take a file of another model or revision.

    Returns:
        The calibration, or None; and the recipes, changed only for ``none``.

    Raises:
        CalibrationError: a missing or damaged file, or one of another model.
    """
    if choice == "none":
        return None, [without_calibration(recipe) for recipe in recipes]
    if choice is not None:
        return _from_file(Path(choice), loaded, allow_mismatch), list(recipes)
    return _cached(loaded) if _any_gains(recipes) else None, list(recipes)


def without_calibration(recipe: "Recipe") -> "Recipe":
    """The recipe with what needs a calibration switched off, which is said on standard error."""
    from bitdecoding.recipe import KeyRounding, QuerySmoothing

    if not recipe.needs_calibration:
        return recipe
    lost = []
    if recipe.key_smoothing:
        lost.append("key smoothing (outlier channels of the keys coarsen the grid of their blocks)")
    if recipe.key_rounding is KeyRounding.LDLQ:
        lost.append("LDLQ (keys are rounded to nearest, with a larger error of the logits)")
    if recipe.query_smoothing is QuerySmoothing.TOKEN:
        lost.append("query smoothing (the mean of the queries is quantized too)")
    note(
        f"note: {recipe.name} runs without a calibration and so without {', '.join(lost)}; "
        f"`bitdecoding kl` measures what that costs"
    )
    return recipe.replace(
        name=f"{recipe.name} without calibration",
        key_smoothing=False,
        key_rounding=KeyRounding.NEAREST,
        query_smoothing=QuerySmoothing.GQA if recipe.query_smoothing is QuerySmoothing.GQA else QuerySmoothing.NONE,
    )


def cached_path(loaded: "LoadedModel", window: int) -> Path:
    """Where a model's calibration is cached."""
    from bitdecoding.models import cache_folder

    revision = hashlib.sha256(f"{loaded.model_id}\0{loaded.revision}".encode()).hexdigest()[:16]
    return cache_folder() / "calibrations" / f"{revision}-w{window}.safetensors"


def _from_file(path: Path, loaded: "LoadedModel", allow_mismatch: bool) -> "Calibration":
    from bitdecoding.calibration.storage import check_calibration, load_calibration

    calibration = load_calibration(path)
    check_calibration(calibration, loaded, allow_mismatch=allow_mismatch)
    return calibration


def _any_gains(recipes: Iterable["Recipe"]) -> bool:
    """Whether some recipe needs a calibration or takes its probability threshold."""
    from bitdecoding.numerics.probability import ProbabilityRule
    from bitdecoding.recipe import KVFormat, ProbabilityFormat

    return any(
        recipe.needs_calibration
        or (
            recipe.kv_format is KVFormat.NVFP4
            and recipe.probability_format is ProbabilityFormat.FP4
            and recipe.probability_rule in (None, ProbabilityRule.UNDERFLOW)
            and recipe.probability_tau is None
        )
        for recipe in recipes
    )


def _cached(loaded: "LoadedModel") -> "Calibration":
    """The cached calibration; computed where it is missing or damaged."""
    from bitdecoding.calibration import compute
    from bitdecoding.calibration.storage import save_calibration
    from bitdecoding.models import model_shape

    path = cached_path(loaded, min(model_shape(loaded.model.config).max_context, compute.DEFAULT_WINDOW))
    if path.exists():
        try:
            return _from_file(path, loaded, allow_mismatch=False)
        except CalibrationError as error:
            note(f"note: {error}")
    note(f"calibrating {loaded.model_id}, once; kept in {path}")
    calibration = compute.calibrate(loaded, progress=lambda stage: note(f"calibrating: {stage}"))
    save_calibration(calibration, path)
    return calibration
