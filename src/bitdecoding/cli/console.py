"""What the commands print: results to standard output, progress and notes to standard error."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["note", "print_markdown", "print_table", "progress_bars", "write_json"]

_PIPED_WIDTH = 120


def note(message: str) -> None:
    """Print a line to standard error."""
    print(message, file=sys.stderr, flush=True)


def progress_bars() -> Progress:
    """Progress bars on standard error; nothing where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table()
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(table, markup=False)


def print_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as `print_table`, in Markdown."""
    rule = ["---", *("---:" for _ in header[1:])]
    for row in (header, rule, *rows):
        print("|", " | ".join(row), "|")


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
