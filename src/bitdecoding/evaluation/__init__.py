"""Teacher-forced KL against the 16-bit cache: trajectories, runs and statistics."""

from bitdecoding.evaluation.kl import KLSteps, TeacherForcing, top_kl, truncated_kl
from bitdecoding.evaluation.runner import KLReport, RecipeSummary, run_kl
from bitdecoding.evaluation.statistics import PairedComparison, paired_comparison
from bitdecoding.evaluation.trajectories import (
    Trajectory,
    generate_trajectory,
    load_trajectories,
    save_trajectories,
)

__all__ = [
    "KLReport",
    "KLSteps",
    "PairedComparison",
    "RecipeSummary",
    "TeacherForcing",
    "Trajectory",
    "generate_trajectory",
    "load_trajectories",
    "paired_comparison",
    "run_kl",
    "save_trajectories",
    "top_kl",
    "truncated_kl",
]
