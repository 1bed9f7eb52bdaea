"""Charts of an inspection, drawn with matplotlib (the extra ``plots``)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitdecoding.errors import UnsupportedError
from bitdecoding.evaluation.inspection import LayerInspection

__all__ = ["require_matplotlib", "save_plots"]

_SIZE = (8.0, 4.0)  # inches
_DPI = 150


def require_matplotlib() -> None:
    """Raise `UnsupportedError` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "plots: matplotlib is not installed; install it with `pip install 'bitdecoding-fp4[plots]'`"
        ) from None


def save_plots(layers: Sequence[LayerInspection], folder: str | os.PathLike[str], title: str) -> list[Path]:
    """Draw an inspection to PNG files.

    Args:
        layers: of `inspect_model`.
        folder: made if it is missing; files of the same names in it are replaced.
        title: stands over every chart.

    Returns:
        The files: ``key_outliers.png``, ``probability_underflow.png``.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    charts = {"key_outliers.png": _key_outliers, "probability_underflow.png": _probability_underflow}
    files = []
    for name, draw in charts.items():
        figure = draw(layers)
        figure.suptitle(title)
        figure.savefig(folder / name, dpi=_DPI)
        files.append(folder / name)
    return files


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # pyplot would keep the figure, and may want a display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(_SIZE[0], _SIZE[1] * panels), layout="constrained")
    axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    for axis in axes:
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    return figure, axes


def _line(axis: Any, layers: Sequence[LayerInspection], values: Sequence[float], label: str) -> None:
    axis.plot([layer.layer for layer in layers], values, marker="o", markersize=3, label=label)


def _key_outliers(layers: Sequence[LayerInspection]) -> Any:
    figure, (axis,) = _figure(1)
    axis.set_title("Outliers in the keys", fontsize="medium")
    axis.set_ylabel("max|k| / rms, blocks of 16 channels")
    _line(axis, layers, [layer.raw_keys for layer in layers], "raw")
    _line(axis, layers, [layer.smoothed_keys for layer in layers], "smoothed")
    _line(axis, layers, [layer.rotated_keys for layer in layers], "smoothed and rotated")
    axis.legend()
    return figure


def _probability_underflow(layers: Sequence[LayerInspection]) -> Any:
    figure, (blocks, mass) = _figure(2)
    blocks.set_title("Probability blocks whose scale rounds to 0", fontsize="medium")
    blocks.set_ylabel("share of blocks")
    blocks.set_ylim(0, 1)
    mass.set_title("Attention probability in them", fontsize="medium")
    mass.set_ylabel("share of a query's attention")
    mass.set_yscale("log", nonpositive="mask")
    for label, part in (("plain rule: c = 1, maximum to 6", "plain"), ("the recipe's rule", "recipe")):
        _line(blocks, layers, [getattr(layer, part).blocks for layer in layers], label)
        _line(mass, layers, [getattr(layer, part).mass for layer in layers], label)
    blocks.legend()
    mass.legend()
    return figure
