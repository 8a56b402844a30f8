"""How results are shown and kept: a Markdown table for people, a CSV for everything else."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

OUT = Path(__file__).resolve().parent / "out"

Row = Mapping[str, object]


def cell(value: object, digits: int = 2) -> str:
    """Return a figure as text; what was not measured is a dash, never a zero."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table whose columns also line up in a terminal."""
    lines = [list(headers), *([cell(value) for value in row] for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(headers))]

    def join(line: Sequence[str]) -> str:
        first, *rest = line
        cells = [first.ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([join(lines[0]), join(rule), *map(join, lines[1:])])


def write_csv(name: str, rows: Sequence[Row], facts: Mapping[str, str]) -> Path:
    """Write `rows` to a new file under ``benches/out`` and return its path.

    The facts come first, as lines that begin with ``#``, so that no figure travels without them.
    """
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}.csv"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        for key, value in facts.items():
            file.write(f"# {key}: {value}\n")
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return path


def note(text: str) -> None:
    """Tell somebody who waits what is going on, apart from the results."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def parser(name: str, text: str) -> argparse.ArgumentParser:
    """Return the parser of a scene; `text` says what it measures and how long it takes."""
    return argparse.ArgumentParser(
        prog=f"python -m benches {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def print_facts(facts: Mapping[str, str]) -> None:
    """Print the facts, one a line."""
    for key, value in facts.items():
        print(f"{key}: {value}")
    print()
