"""Prints tables to the console."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness.records import Row


def _cell(value: object) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, dict):  # a Timing
        return f"{value['median']:.4g} ({value['q1']:.4g}–{value['q3']:.4g})"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(title: str, rows: Sequence[Row], names: str) -> None:
    """Prints a table of the rows' values of these names, without names that no row has.

    `name=header` sets a header other than the name. A timing is printed as its median and
    quartiles; text is left-aligned, figures are right-aligned.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    lines = []
    for each in names.split():
        name, _, header = each.partition("=")
        texts = [_cell(row.get(name)) for row in rows]
        if any(texts):
            is_figure = all(text[:1].isdigit() for text in texts if text)
            justify = "right" if is_figure else "left"
            table.add_column((header or name).replace("_", " "), justify=justify, overflow="fold")
            lines.append(texts)
    for line in zip(*lines, strict=True):
        table.add_row(*line)
    # A terminal limits the width; for a file the table may be as wide as necessary.
    Console(width=None if sys.stdout.isatty() else 260).print(table)
