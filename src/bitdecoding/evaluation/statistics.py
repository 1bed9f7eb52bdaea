"""Statistics of per-trajectory means: mean, spread and the paired t test between two recipes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy import stats

from bitdecoding.errors import InvalidInputError

__all__ = ["PairedComparison", "paired_comparison"]


@dataclass(frozen=True)
class PairedComparison:
    """Recipe A against recipe B on the same trajectories.

    Attributes:
        mean_difference: mean of A - B.
        ratio: mean of A over mean of B (inf if B is 0).
        wins: trajectories on which A is lower.
        count: trajectories.
        t: paired t statistic of A - B; None with fewer than two trajectories or no spread.
        p_value: two-sided, count - 1 degrees of freedom; None where t is.
    """

    mean_difference: float
    ratio: float
    wins: int
    count: int
    t: float | None
    p_value: float | None


def paired_comparison(a: Sequence[float], b: Sequence[float]) -> PairedComparison:
    """Compare per-trajectory means of two recipes, in the same order of trajectories.

    Raises:
        InvalidInputError: different or zero lengths.
    """
    if len(a) != len(b) or not a:
        raise InvalidInputError(f"a, b: need the same, non-zero number of trajectories, got {len(a)} and {len(b)}")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean_b = fmean(b)
    t = p_value = None
    if len(a) > 1 and stdev(differences) > 0:
        result = stats.ttest_rel(a, b)
        t, p_value = float(result.statistic), float(result.pvalue)
    return PairedComparison(
        mean_difference=fmean(differences),
        ratio=fmean(a) / mean_b if mean_b else float("inf"),
        wins=sum(d < 0 for d in differences),
        count=len(a),
        t=t,
        p_value=p_value,
    )
