"""Charts of the benchmarks, drawn if matplotlib is installed (``pip install uma-trio[bench]``).

Each function draws one kind, a panel for each title, and returns the files: PNG and SVG, in
``benches/out`` with the time in their names, or `into` a folder without; none without matplotlib,
which is said, or where there is nothing to draw. The same data gives the same files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches import report
from benches.pace import Point

_COLOURS = ("#1b6ca8", "#c8553d", "#5b8c5a", "#7d5ba6", "#b8860b", "#8a8a8a")
_MARKS = ("o", "s", "^", "D", "v", "x")
_RATIOS = (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)

Pairs = Sequence[tuple[float, float]]
Draw = Callable[[Any, Any], None]
"""Draws its data into the axes that it is given."""


def pareto(
    name: str,
    panels: Mapping[str, Sequence[Point]],
    units: Mapping[str, str],
    caption: str,
    *,
    into: Path | None = None,
) -> list[Path]:
    """Draw for each load what others got against what it cost the reader, a line a server."""

    def panel(title: str) -> Draw:
        return lambda axis, points: _pareto(axis, points, units[title])

    drawn = {title: (panel(title), found) for title, found in panels.items()}
    return _draw(name, drawn, caption, into)


def lines(
    name: str,
    panels: Mapping[str, Mapping[str, Pairs]],
    labels: tuple[str, str],
    caption: str,
    *,
    doubling: bool = False,
    wide: bool = False,
    marks: bool = False,
    levels: Sequence[float] = (),
    into: Path | None = None,
) -> list[Path]:
    """Draw a line for each series over x.

    With `doubling`, x is labelled where it is measured; with `wide`, y has room for values of very
    different size. `marks` shows each value over whole numbers of x, and each of `levels` is a dashed line across.
    """

    def panel(axis: Any, series: Mapping[str, Pairs]) -> None:
        for i, (label, pairs) in enumerate(series.items()):
            at, high = [x for x, _ in pairs], [y for _, y in pairs]
            colour, mark = _style(i)
            shown = mark if doubling or marks else None
            axis.plot(at, high, marker=shown, ls="-", color=colour, label=label)
        if marks:
            axis.xaxis.get_major_locator().set_params(integer=True, steps=[1, 2, 4, 10])
        for level in levels:
            axis.axhline(level, ls="--", lw=0.8, color=_COLOURS[-1])
        if doubling:
            measured = sorted({x for pairs in series.values() for x, _ in pairs})
            axis.set_xscale("log", base=2)
            axis.set_xticks(measured, [f"{x:g}" for x in measured])
        _finish(axis, *labels, wide=wide)

    known = {
        title: {label: pairs for label, pairs in series.items() if pairs}
        for title, series in panels.items()
    }
    return _draw(name, {title: (panel, found) for title, found in known.items()}, caption, into)


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


def _pareto(axis: Any, points: Sequence[Point], unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for i, family in enumerate(dict.fromkeys(p.family for p in points)):
        line = sorted((p for p in points if p.family == family), key=lambda p: p.p95_x)
        colour, mark = _style(i)
        at, high = [p.p95_x for p in line], [p.background for p in line]
        axis.plot(at, high, mark, ls="-", color=colour, label=family)
        for p in line:
            axis.annotate(
                p.knob, (p.p95_x, p.background), xytext=(4, -11 if i % 2 else 5),
                textcoords="offset points", fontsize=8, color=colour,
            )  # fmt: skip
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    low, top = min(p.p95_x for p in points), max(p.p95_x for p in points)
    axis.set_xticks([t for t in _RATIOS if 0.9 * low <= t <= 1.15 * top] or [1])
    _finish(
        axis, "interactive p95 ITL, with load / alone (left is better)", f"{unit} (up is better)"
    )


def _style(i: int) -> tuple[str, str]:
    return _COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]


def _finish(axis: Any, x: str, y: str, *, wide: bool = False) -> None:
    if wide:
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.12 * axis.dataLim.y1)  # from nothing on, with room for labels
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.legend()


def _draw(
    name: str, panels: Mapping[str, tuple[Draw, Any]], caption: str, into: Path | None = None
) -> list[Path]:
    """Draw every panel that has data side by side, and save the figure in both formats."""
    shown = {title: found for title, found in panels.items() if found[1]}
    if not shown:
        return []
    try:
        import matplotlib as mpl
    except ImportError:
        report.note("no chart: matplotlib is not installed (pip install 'matplotlib>=3.9,<4')")
        return []
    mpl.use("Agg")
    mpl.rcParams.update(
        {"svg.hashsalt": name, "svg.fonttype": "none"}
    )  # small, and no chance in it
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(shown), figsize=(6.4 * len(shown), 5.0), squeeze=False)
    for axis, (title, (draw, data)) in zip(axes[0], shown.items(), strict=True):
        draw(axis, data)
        axis.set_title(title)
    figure.text(0.01, 0.005, caption, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    folder = report.OUT if into is None else into
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%dT%H%M%S')}" if into is None else name
    files = [folder / f"{stem}.{kind}" for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def caption(facts: Mapping[str, str]) -> str:
    """Return what stands below a chart, so that no chart travels without its machine."""
    return "; ".join(facts[key] for key in ("machine", "model", "date", "uma-trio") if key in facts)
