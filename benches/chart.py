"""Charts of the benchmarks, drawn if matplotlib is installed (``pip install uma-trio[bench]``)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benches import report
from benches.pace import Point

_COLOURS = ("#1b6ca8", "#c8553d", "#5b8c5a", "#7d5ba6", "#8a8a8a")
_MARKS = ("o", "s", "^", "D", "v")


def pareto(
    name: str, panels: Mapping[str, Sequence[Point]], units: Mapping[str, str], caption: str
) -> list[Path]:
    """Draw a panel for each load: what others got against what it cost the reader.

    Returns the files, PNG and SVG; none without matplotlib, which is said.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        report.note("no chart: matplotlib is not installed (pip install 'matplotlib>=3.9,<4')")
        return []
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    shown = {title: points for title, points in panels.items() if points}
    if not shown:
        return []
    figure, axes = plt.subplots(1, len(shown), figsize=(6.4 * len(shown), 5.0), squeeze=False)
    for axis, (title, points) in zip(axes[0], shown.items(), strict=True):
        families = list(dict.fromkeys(p.family for p in points))
        for i, family in enumerate(families):
            line = sorted((p for p in points if p.family == family), key=lambda p: p.p95_x)
            colour, mark = _COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]
            at, high = [p.p95_x for p in line], [p.background for p in line]
            axis.plot(at, high, mark, ls="-", color=colour, label=family)
            for p in line:
                axis.annotate(
                    p.knob, (p.p95_x, p.background), xytext=(4, 5), textcoords="offset points",
                    fontsize=8, color=colour,
                )  # fmt: skip
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        ticks = [1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 200]
        low, top = min(p.p95_x for p in points), max(p.p95_x for p in points)
        axis.set_xticks([t for t in ticks if 0.9 * low <= t <= 1.15 * top] or [1])
        axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.set_xlabel("interactive p95 gap, with load / alone (left is better)")
        axis.set_ylabel(f"{units[title]} (up is better)")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.text(0.01, 0.005, caption, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    report.OUT.mkdir(exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%dT%H%M%S')}"
    files = [report.OUT / f"{stem}.{kind}" for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return files
