"""Print the markdown tables of docs/accuracy.md from a file of benchmarks/accuracy.py.

python benchmarks/accuracy_tables.py benchmarks/results/accuracy-smollm2-135m.json
"""

import json
import sys
from pathlib import Path
from typing import Any


def number(x: float | None, fmt: str) -> str:
    return "–" if x is None else format(x, fmt)


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "--:|" * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def recipe_table(result: dict[str, Any]) -> str:
    """Every recipe with its KL, top-1 agreement and comparison."""
    against = {c["recipe"]: c for c in result["comparisons"]}
    rows = []
    for recipe in result["recipes"]:
        row = [f"`{recipe['name']}`" if " " not in recipe["name"] else recipe["name"], f"{recipe['mean_kl']:.5f}"]
        row.append(f"{1 - recipe['mean_top1_mismatch']:.2%}")
        c = against.get(recipe["name"])
        if c is None:
            row += ["", "", "", ""]
        else:
            row += [f"{c['ratio']:.2f} × `{c['against']}`", f"{c['wins']}/{c['count']}"]
            row += [number(c["t"], ".2f"), number(c["p_value"], ".4f")]
        rows.append(row)
    return table(["recipe", "mean KL [nats]", "top-1 agreement", "KL relative to", "lower on", "t", "p"], rows)


def query_table(result: dict[str, Any]) -> str:
    """Query formats and their share of the logit error."""
    rows = [
        [r["query"], f"{r['logit_mse']:.5f}", f"{r['logit_mse_keys_only']:.5f}", f"{r['query_share']:.1%}"]
        for r in result["query_formats"]
    ]
    return table(["query", "logit MSE", "of which keys", "share of the query"], rows)


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text())
    print(recipe_table(result), query_table(result), sep="\n\n")


if __name__ == "__main__":
    main()
