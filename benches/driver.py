"""Runs a scene: its options, what it compares, its table, its CSV, its chart.

A scene is a function that is registered by :func:`scene` or :func:`tool` in a module of
``benches/scenes``. benches/README.md shows one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benches import chart, contest, host, report, servers
from benches.contest import Column, Medians, Row, System
from benches.model import NoVocabulary, bench_model
from benches.peers import NoPeers, programs
from benches.report import note

Arguments = Callable[[argparse.ArgumentParser], object]


@dataclass(frozen=True)
class Here:
    """What a scene measures with. `peers` is None where there are none, or none are wanted."""

    seed: int
    threads: int
    peers: Path | None
    model: Path


@dataclass(frozen=True)
class Table:
    """A table of medians. `count` is the figure whose sum is n; without it n is the repetitions."""

    title: str
    columns: Sequence[Column]
    count: str | None = None


@dataclass(frozen=True)
class Comparison:
    """What is compared and how it is shown. One measurement takes about `seconds`.

    When `minutes` are over, the rest of the run is left out, which is said. `bars` are panels of a
    chart: a figure by title, with a dashed line at its title's target. `curves` is a title, a
    figure, and the labels of both axes: a line for each system over the number in its cases.
    """

    systems: Sequence[System]
    seconds: float
    tables: Sequence[Table]
    minutes: float = 60.0
    repetitions: int = 3
    facts: Mapping[str, object] = field(default_factory=dict)
    progress: Callable[[Row], str] = lambda _row: "done"
    complete: Callable[[list[Row]], list[Row]] = lambda rows: rows
    verdicts: Callable[[Medians], Iterable[str]] = lambda _medians: ()
    bars: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, float] = field(default_factory=dict)
    curves: tuple[str, str, tuple[str, str]] | None = None


@dataclass(frozen=True)
class Scene:
    """A registered function: its name, its help, its parser, and how it is run."""

    name: str
    text: str
    parser: Callable[[], argparse.ArgumentParser]
    run: Callable[[argparse.Namespace], int]


SCENES: dict[str, Scene] = {}


def scene(
    arguments: Arguments = lambda _parser: None, *, policies: Sequence[str] | None = None
) -> Callable[[Callable[[argparse.Namespace, Here], Comparison]], Callable[..., Comparison]]:
    """Register a function that returns a comparison, under its own name.

    `arguments` adds its options; with `policies` it has ``--policies`` with these as the default.
    """

    def register(
        function: Callable[[argparse.Namespace, Here], Comparison],
    ) -> Callable[..., Comparison]:
        name, text = function.__name__, sys.modules[function.__module__].__doc__ or ""

        def parser() -> argparse.ArgumentParser:
            made = report.parser(name, text)
            _common_arguments(made)
            if policies is not None:
                made.add_argument("--policies", nargs="+", default=[*policies], metavar="NAME")
            arguments(made)
            return made

        SCENES[name] = Scene(name, text, parser, lambda given: compare(name, function, given))
        return function

    return register


def tool(arguments: Arguments) -> Callable[[Callable[[argparse.Namespace], int]], object]:
    """Register a function that starts no server, or compares nothing, under its own name."""

    def register(function: Callable[[argparse.Namespace], int]) -> object:
        name, text = function.__name__, sys.modules[function.__module__].__doc__ or ""

        def parser() -> argparse.ArgumentParser:
            made = report.parser(name, text)
            arguments(made)
            return made

        SCENES[name] = Scene(name, text, parser, function)
        return function

    return register


def load() -> dict[str, Scene]:
    """Import every module of ``benches/scenes`` and return what is registered, by name."""
    from benches import scenes

    for module in pkgutil.iter_modules(scenes.__path__):
        importlib.import_module(f"{scenes.__name__}.{module.name}")
    return dict(sorted(SCENES.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scene that the command line names, or list them all; return the exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["list"]
    known = load()
    if name in ("list", "-h", "--help"):
        width = max(map(len, known))
        for each in known.values():
            print(f"{each.name:<{width}}  {each.text.strip().splitlines()[0]}")
        print("\npython -m benches SCENE [options]; SCENE --help says more")
        return 0
    if name not in known:
        note(f"there is no scene {name!r}; there are {', '.join(known)}")
        return 2
    return known[name].run(known[name].parser().parse_args(rest))


def compare(
    name: str, function: Callable[[argparse.Namespace, Here], Comparison], given: argparse.Namespace
) -> int:
    """Measure, print tables and verdicts, write the CSV, then draw; return the exit status."""
    here = _here(given)
    found = function(given, here)
    facts = _facts(here) | {key: str(value) for key, value in found.facts.items()}
    report.print_facts(facts)
    once = given.quick or given.dry_run
    effort = contest.Effort(
        given.repetitions or (1 if once else found.repetitions),
        found.seconds,
        given.minutes or found.minutes,
    )
    rows = found.complete(contest.run(found.systems, effort, here.seed, found.progress))
    medians = Medians(found.systems, rows)
    for table in found.tables:
        if text := medians.table(table.columns, table.count):
            print(f"{table.title}\n\n{text}\n" if table.title else f"{text}\n")
    for line in found.verdicts(medians):
        print(line)
    print(f"\n{report.write_csv(name, rows, facts)}")
    for file in _draw(name, found, medians, chart.caption(facts)):
        print(file)
    return 1 if not rows or any(row.get("error") for row in rows) else 0


def _draw(name: str, found: Comparison, medians: Medians, caption: str) -> Iterable[Path]:
    """Draw the charts of a comparison and yield their files."""
    if found.bars:
        panels = {title: medians.by_name(figure) for title, figure in found.bars.items()}
        yield from chart.bars(name, panels, found.targets, caption)
    if found.curves is not None:
        title, figure, labels = found.curves
        series = {title: medians.by_case(figure)}
        yield from chart.lines(name, series, labels, caption)


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--peers", type=Path, help="folder of llama.cpp's programs (UMA_PEERS)")
    add("--no-peers", action="store_true", help="measure only the daemon")
    add("--model", type=Path, help="GGUF to use (UMA_BENCH_MODEL)")
    add("--vocab", type=Path, help="vocabulary of the model that is made")
    add("--threads", type=int, help="compute threads of every system")
    add("--seed", type=int, help="seed of the prompts; printed when not given")
    add("--repetitions", type=int, metavar="N", help="of everything")
    add("--minutes", type=float, metavar="M", help="when to give up what is left")
    add("--quick", action="store_true", help="a short look, not a measurement")
    add("--dry-run", action="store_true", help="the whole path on a fake model, no peers: seconds")


def _here(given: argparse.Namespace) -> Here:
    """Return what the common arguments say; peers that are not there are said and left out."""
    folder: Path | None = None
    if not given.no_peers and not given.dry_run:
        try:
            folder = programs(given.peers)
        except NoPeers as absence:
            note(f"{absence}\nMeasuring the daemon alone: without a peer it is no result.")
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    try:
        model = servers.FAKE if given.dry_run else bench_model(given.model, given.vocab)
    except NoVocabulary as absence:
        raise SystemExit(str(absence)) from None
    return Here(seed, given.threads or len(os.sched_getaffinity(0)), folder, model)


def _facts(here: Here) -> dict[str, str]:
    """Return what a reader has to know to judge the figures of this run."""
    spinning = servers.environment()
    return host.facts(here.peers / "llama-server" if here.peers else None) | {
        "OpenMP": " ".join(f"{k}={spinning[k]}" for k in _SPINNING if k in spinning),
        "noise": host.noise(),
        "threads": str(here.threads),
        "seed": str(here.seed),
        "model": here.model.name,
    }


_SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
