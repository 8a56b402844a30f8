"""Charts of the benchmarks, drawn if matplotlib is installed (``pip install uma-trio[bench]``).

Each function draws one kind, a panel for each title, and returns the files: PNG and SVG in
``benches/out``; none without matplotlib, which is printed, or without data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches import report

_COLOURS = ("#1b6ca8", "#c8553d", "#5b8c5a", "#7d5ba6", "#b8860b", "#8a8a8a")
_MARKS = ("o", "s", "^", "D", "v", "x")

Pairs = Sequence[tuple[float, float]]
Draw = Callable[[Any, Any], None]
"""Draws data into axes."""


def lines(
    name: str,
    panels: Mapping[str, Mapping[str, Pairs]],
    labels: tuple[str, str],
    caption: str,
) -> list[Path]:
    """Draw a line for each series over the logarithm of x."""

    def panel(axis: Any, series: Mapping[str, Pairs]) -> None:
        for i, (label, pairs) in enumerate(series.items()):
            at, high = [x for x, _ in pairs], [y for _, y in pairs]
            mark, colour = _MARKS[i % len(_MARKS)], _COLOURS[i % len(_COLOURS)]
            axis.plot(at, high, marker=mark, ls="-", color=colour, label=label)
        measured = sorted({x for pairs in series.values() for x, _ in pairs})
        axis.set_xscale("log", base=2)
        axis.set_xticks(measured, [f"{x:g}" for x in measured])
        axis.set_ylim(0, 1.12 * axis.dataLim.y1)  # room for labels
        axis.set_xlabel(labels[0])
        axis.set_ylabel(labels[1])
        axis.grid(alpha=0.3)
        axis.legend()

    known = {
        title: {label: pairs for label, pairs in series.items() if pairs}
        for title, series in panels.items()
    }
    return _draw(name, {title: (panel, found) for title, found in known.items()}, caption)


def bars(
    name: str,
    panels: Mapping[str, Mapping[str, float]],
    targets: Mapping[str, float],
    caption: str,
) -> list[Path]:
    """Draw a bar for each system; a panel's target is a dashed line."""

    def panel(title: str) -> Draw:
        def draw(axis: Any, values: Mapping[str, float]) -> None:
            drawn = axis.barh(list(values), list(values.values()), color=_COLOURS[0])
            axis.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.grid(alpha=0.3, axis="x")
            if title in targets:
                axis.axvline(targets[title], ls="--", color=_COLOURS[1], label="target")
                axis.legend()

        return draw

    return _draw(name, {title: (panel(title), found) for title, found in panels.items()}, caption)


def _draw(name: str, panels: Mapping[str, tuple[Draw, Any]], caption: str) -> list[Path]:
    shown = {title: found for title, found in panels.items() if found[1]}
    if not shown:
        return []
    try:
        import matplotlib as mpl
    except ImportError:
        report.note("no chart: matplotlib is not installed (pip install 'matplotlib>=3.9,<4')")
        return []
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})  # reproducible files
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(shown), figsize=(6.4 * len(shown), 5.0), squeeze=False)
    for axis, (title, (draw, data)) in zip(axes[0], shown.items(), strict=True):
        draw(axis, data)
        axis.set_title(title)
    figure.text(0.01, 0.005, caption, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    report.OUT.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%dT%H%M%S')}"
    files = [report.OUT / f"{stem}.{kind}" for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def caption(facts: Mapping[str, str]) -> str:
    """Return the line below a chart: machine, model, date, commit."""
    return "; ".join(facts[key] for key in ("machine", "model", "date", "uma-trio") if key in facts)
