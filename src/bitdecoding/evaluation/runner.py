"""Runs several recipes over several trajectories, saving every cell at once, so that a stopped run goes on."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bitdecoding.calibration.data import Calibration
from bitdecoding.errors import InvalidInputError
from bitdecoding.evaluation.kl import TOP_TOKENS, KLSteps, TeacherForcing
from bitdecoding.evaluation.statistics import PairedComparison, paired_comparison
from bitdecoding.evaluation.trajectories import Trajectory
from bitdecoding.models import LoadedModel
from bitdecoding.recipe import Recipe, Rotation

__all__ = ["RESULT_VERSION", "KLReport", "RecipeSummary", "hadamard_draws", "run_kl"]

RESULT_VERSION = 2
"""Of the results file; a file of another version is refused, never mixed."""


@dataclass(frozen=True)
class RecipeSummary:
    """One recipe over all trajectories; where a recipe has several Hadamard draws, they are averaged a trajectory.

    Attributes:
        name: the recipe's.
        draws: Hadamard draws averaged.
        kl: mean KL of each trajectory, nats.
        truncated_kl: mean truncated KL of each trajectory, nats (see `KLSteps`).
        mismatch: top-1 mismatch rate of each trajectory.
    """

    name: str
    draws: int
    kl: tuple[float, ...]
    truncated_kl: tuple[float, ...]
    mismatch: tuple[float, ...]

    @property
    def mean_kl(self) -> float:
        """Mean over trajectories, nats."""
        return fmean(self.kl)

    @property
    def mean_mismatch(self) -> float:
        """Mean over trajectories."""
        return fmean(self.mismatch)


@dataclass(frozen=True)
class KLReport:
    """Results of `run_kl`: a summary a recipe, in the order asked for, and the names of the trajectories."""

    trajectories: tuple[str, ...]
    summaries: tuple[RecipeSummary, ...]

    def summary(self, name: str) -> RecipeSummary:
        """The summary of one recipe."""
        for summary in self.summaries:
            if summary.name == name:
                return summary
        raise InvalidInputError(f"recipe: {name} is not in this report; it has {[s.name for s in self.summaries]}")

    def compare(self, a: str, b: str) -> PairedComparison:
        """Paired comparison of two recipes' per-trajectory mean KL."""
        return paired_comparison(self.summary(a).kl, self.summary(b).kl)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable summary."""
        return {
            "trajectories": list(self.trajectories),
            "recipes": [
                {
                    "name": s.name,
                    "draws": s.draws,
                    "mean_kl": s.mean_kl,
                    "mean_truncated_kl": fmean(s.truncated_kl),
                    "mean_top1_mismatch": s.mean_mismatch,
                    "kl_per_trajectory": list(s.kl),
                    "truncated_kl_per_trajectory": list(s.truncated_kl),
                    "top1_mismatch_per_trajectory": list(s.mismatch),
                }
                for s in self.summaries
            ],
        }


def hadamard_draws(recipe: Recipe, draws: int) -> list[Recipe]:
    """The recipe itself (``draws`` = 0) or copies with random Hadamard signs of seeds 0..draws-1.

    Recipes without a Hadamard rotation have nothing to draw and come back alone.
    """
    if draws < 0:
        raise InvalidInputError(f"draws: must not be negative, got {draws}")
    if draws == 0 or recipe.rotation is not Rotation.HADAMARD:
        return [recipe]
    return [recipe.replace(rotation_seed=seed) for seed in range(draws)]


def run_kl(
    loaded: LoadedModel,
    trajectories: Sequence[Trajectory],
    recipes: Sequence[Recipe],
    *,
    calibration: Calibration | None = None,
    draws: int = 0,
    results_path: str | os.PathLike[str] | None = None,
    on_cell: Callable[[], None] = lambda: None,
) -> KLReport:
    """Teacher-forced KL of recipes against the 16-bit cache.

    Args:
        loaded: the model.
        trajectories: reference trajectories of this model, with distinct names.
        recipes: recipes with distinct names.
        calibration: statistics for recipes that need them.
        draws: random Hadamard draws averaged for each recipe with a Hadamard rotation; 0 uses the plain matrix.
        results_path: JSON file that receives every cell as it is done and the summary at the end; cells of an earlier,
            unfinished run of the same model, calibration, trajectory and recipe are taken from it.
        on_cell: called after each cell (trajectory × recipe × draw), also for those taken from the file.

    Raises:
        InvalidInputError: no trajectories or recipes, duplicate names, a results file that is none.
        CalibrationError: as `TeacherForcing.run`; before anything is computed.
    """
    names = [r.name for r in recipes]
    if not trajectories or not recipes:
        raise InvalidInputError("trajectories, recipes: need at least one of each")
    if len(set(names)) < len(names):
        raise InvalidInputError(f"recipes: names must differ, got {names}")
    if len({t.name for t in trajectories}) < len(trajectories):
        raise InvalidInputError(f"trajectories: names must differ, got {[t.name for t in trajectories]}")
    forcing = TeacherForcing(loaded, calibration)
    variants = {recipe.name: hadamard_draws(recipe, draws) for recipe in recipes}
    for group in variants.values():
        forcing.codecs(group[0])
    store = _CellStore(results_path, loaded, calibration)
    cells: dict[tuple[str, str], list[KLSteps]] = {}
    for trajectory in trajectories:
        for name, group in variants.items():
            for variant in group:
                key = store.key(trajectory, variant)
                steps = store.get(key)
                if steps is None:
                    steps = forcing.run(trajectory, variant)
                    store.put(key, trajectory, variant, steps)
                cells.setdefault((trajectory.name, name), []).append(steps)
                on_cell()
    report = KLReport(
        tuple(t.name for t in trajectories),
        tuple(
            RecipeSummary(
                name,
                len(group),
                tuple(fmean(s.mean_kl for s in cells[t.name, name]) for t in trajectories),
                tuple(fmean(s.mean_truncated_kl for s in cells[t.name, name]) for t in trajectories),
                tuple(fmean(s.mismatch_rate for s in cells[t.name, name]) for t in trajectories),
            )
            for name, group in variants.items()
        ),
    )
    store.finish(report)
    return report


class _CellStore:
    """Cells done so far, in memory and in a JSON file that is replaced whole after each."""

    def __init__(
        self, path: str | os.PathLike[str] | None, loaded: LoadedModel, calibration: Calibration | None
    ) -> None:
        self._path = None if path is None else Path(path)
        self._context = [loaded.revision, str(loaded.model.dtype), _calibration_digest(calibration)]
        self._content: dict[str, Any] = {
            "version": RESULT_VERSION,
            "model_id": loaded.model_id,
            "revision": loaded.revision,
            "dtype": str(loaded.model.dtype),
            "device": str(loaded.model.device),
            "top_tokens": TOP_TOKENS,
            "calibration": None if calibration is None else calibration.metadata,
            "cells": {},
        }
        if self._path is not None and self._path.exists():
            self._content["cells"] = _read_cells(self._path)

    def key(self, trajectory: Trajectory, recipe: Recipe) -> str:
        """Identifies a cell by everything its numbers depend on."""
        fields = recipe.model_dump(mode="json", exclude={"name"})
        text = json.dumps([*self._context, trajectory.digest, fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def get(self, key: str) -> KLSteps | None:
        cell = self._content["cells"].get(key)
        return (
            None if cell is None else KLSteps(tuple(cell["kl"]), tuple(cell["truncated_kl"]), tuple(cell["mismatch"]))
        )

    def put(self, key: str, trajectory: Trajectory, recipe: Recipe, steps: KLSteps) -> None:
        self._content["cells"][key] = {
            "trajectory": trajectory.name,
            "recipe": recipe.name,
            "rotation_seed": recipe.rotation_seed,
            "kl": list(steps.kl),
            "truncated_kl": list(steps.truncated_kl),
            "mismatch": list(steps.mismatch),
        }
        self._write()

    def finish(self, report: KLReport) -> None:
        self._content["summary"] = report.to_dict()
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self._content) + "\n")
        os.replace(temporary, self._path)


def _read_cells(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"results: {path} is not JSON ({error}); choose another file") from None
    if not isinstance(content, dict) or content.get("version") != RESULT_VERSION or "cells" not in content:
        raise InvalidInputError(f"results: {path} is not a results file of this version; choose another file")
    cells: dict[str, Any] = content["cells"]
    return cells


def _calibration_digest(calibration: Calibration | None) -> str | None:
    if calibration is None:
        return None
    digest = hashlib.sha256(calibration.key_mean.numpy().tobytes())
    digest.update(repr((calibration.tau, calibration.ldlq_damping)).encode())
    for tensor in (calibration.query_second_moment, calibration.query_mean):
        digest.update(b"" if tensor is None else tensor.numpy().tobytes())
    return digest.hexdigest()[:24]
