"""Draw a results file of benchmarks/kernels.py: a roofline and the speed-ups over the best BF16 kernel.

python benchmarks/kernels_plots.py benchmarks/results/h200-kernels.json [--folder benchmarks/results]

Writes NAME-roofline.png and NAME-speedup.png beside the results, or to a folder.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, Any]

PEAK_TFLOPS = 989.0  # H200, dense BF16, data sheet
DPI = 150


def decode_rows(result: Mapping[str, Any]) -> list[Row]:
    """Measured rows of decode kernels with one query token."""
    other = ("step_overhead", "quantize", "gather")
    return [r for r in result["rows"] if r["us"] is not None and r["kernel"] not in other and r["q_len"] == 1]


def name_of(row: Row) -> str:
    """A kernel in the legend."""
    if row["mode"] == "peer":
        return f"{row['kernel']}, {row['kv_format'].upper()}"
    return f"{row['kv_format'].upper()} {row['mode']}" + (", page-centred" if row["plus"] else "")


def tflops(row: Row) -> float:
    """Rate of the arithmetic that attention itself takes: two products a query head and token."""
    operations = 4 * row["batch"] * row["q_len"] * row["num_q_heads"] * row["head_dim"] * row["context"]
    return operations / row["us"] / 1e6


def intensity(row: Row) -> float:
    """Operations a byte."""
    return tflops(row) / row["tb_per_s"]


def by(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows grouped by these columns, in their order."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[column] for column in columns)].append(row)
    return dict(groups)


def title_of(result: Mapping[str, Any]) -> str:
    """GPU and date."""
    return f"{result['gpu']}, {result['date']}"


def roofline(result: Mapping[str, Any]) -> Figure:
    """Every decode row under the roof of the plain read and of the tensor cores."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis: Axes = figure.subplots()
    read = result["plain_read_tb_per_s"]
    ridge = PEAK_TFLOPS / read
    axis.plot([1, ridge, 1000], [read, PEAK_TFLOPS, PEAK_TFLOPS], color="black", linewidth=1)
    axis.annotate(f"plain read, {read:.2f} TB/s", (ridge / 4, read * ridge / 10), fontsize="small")
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in decode_rows(result):
        groups[name_of(row)].append(row)
    for name, rows in groups.items():
        axis.plot([intensity(r) for r in rows], [tflops(r) for r in rows], ".", markersize=5, label=name, alpha=0.8)
    axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axis.grid(alpha=0.3)
    if groups:
        axis.legend(fontsize="small")
    figure.suptitle(f"Decode kernels under the roofline ({title_of(result)})")
    return figure


def speedup(result: Mapping[str, Any]) -> Figure:
    """Speed-up over the best BF16 kernel by context: a panel for each format and mode, models by row.

    Page-centred keys are left out: their lines lie on those of the others.
    """
    compared = [r for r in decode_rows(result) if r["speedup_vs_best_bf16"] is not None]
    rows = [r for r in compared if r["kv_format"] != "bf16" and not r["plus"]]
    models = by(rows, "model")
    names = list(dict.fromkeys(name_of(r) for r in rows))
    size = (max(1, len(models)), max(1, len(names)))
    figure = Figure(figsize=(3 * size[1] + 1, 2.5 * size[0] + 0.5), layout="constrained")
    axes = figure.subplots(*size, squeeze=False, sharex=True, sharey=True)
    for panels, ((model,), of_model) in zip(axes, models.items(), strict=False):
        for axis, name in zip(panels, names, strict=True):
            axis.set_title(f"{model}: {name}", fontsize="small")
            axis.axhline(1, color="black", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
            of_panel = sorted((r for r in of_model if name_of(r) == name), key=lambda r: (r["batch"], r["context"]))
            for (batch,), line in by(of_panel, "batch").items():
                xs, ys = [r["context"] for r in line], [r["speedup_vs_best_bf16"] for r in line]
                axis.plot(xs, ys, "o-", markersize=3, label=f"batch {batch}")
            if of_panel:
                axis.legend(fontsize="x-small")
        panels[0].set_ylabel("× the best BF16")
    for axis in axes[-1]:
        axis.set_xlabel("context")
    figure.suptitle(f"Decode attention against the fastest BF16 kernel ({title_of(result)})")
    return figure


def save_plots(result: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Both plots as PNG files in ``folder``."""
    files = []
    for what, draw in (("roofline", roofline), ("speedup", speedup)):
        path = folder / f"{name}-{what}.png"
        draw(result).savefig(path, dpi=DPI)
        files.append(path)
    return files


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--folder", type=Path, help="default: where the results lie")
    args = parser.parse_args()
    for path in save_plots(json.loads(args.results.read_text()), args.folder or args.results.parent, args.results.stem):
        print(path.name)


if __name__ == "__main__":
    main()
