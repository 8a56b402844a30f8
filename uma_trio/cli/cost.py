"""`uma-trio doctor --cost`: what a tick of so many tokens takes here, as a table with bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from uma_trio.cli.output import OK, USAGE, complain, console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from uma_trio.app.build import Progress
    from uma_trio.backend.base import Backend
    from uma_trio.config.options import Config
    from uma_trio.policy.cost import CostModel
    from uma_trio.policy.costing.calibrate import Measured

Load = Callable[["Config", "Progress | None"], "Backend"]

_WIDEST_BAR = 32  # columns
_DECODERS = (1, 2, 3, 4, 5, 6, 7, 8)


@frozen
class MeasuredSize:
    """One measured count of tokens. `note` says what is remarkable about it."""

    tokens: int
    ms: float
    note: str = ""

    @property
    def per_s(self) -> float:
        """Tokens per second in ticks of this size."""
        return self.tokens / self.ms * 1e3

    @property
    def ms_per_token(self) -> float:
        """Milliseconds that one of its tokens takes."""
        return self.ms / self.tokens


def show_cost(config: Config, *, fresh: bool, as_json: bool, load: Load | None = None) -> int:
    """Print the staircase of the configured model: 0, or 1 if it cannot be loaded."""
    from uma_trio.app.build import load_backend
    from uma_trio.backend.base import ModelError
    from uma_trio.models.files import chosen_policy, fit_to_memory
    from uma_trio.policy.costing.calibrate import measured_cost
    from uma_trio.policy.pipeline import needs_cost

    if not needs_cost(chosen_policy(config)):
        # What is kept belongs to a set-up with a slot for ballast.
        config = evolve(config, policy="deadline")
    try:
        if config.n_ctx is None:
            config = fit_to_memory(config).config
        backend = (load or load_backend)(config, None)
    except ModelError as error:
        complain(str(error))
        return USAGE
    try:
        measured = measured_cost(backend, fresh=fresh)
        most = backend.limits.n_batch
        about = f"{backend.model.name} on {backend.description}"
    finally:
        backend.close()
    if as_json:
        print_json({"about": about, **as_values(measured, most)})
    else:
        _show(about, measured, most)
    return OK


def measured_sizes(cost: CostModel, most: int) -> list[MeasuredSize]:
    """Return the measured counts, with a note where the staircase goes down or levels off."""
    found: list[MeasuredSize] = []
    plateau = cost.plateau(most)
    for tokens, seconds in cost.table().items():
        notes = [] if tokens != plateau else ["plateau"]
        if found and seconds * 1e3 < found[-1].ms:
            notes.insert(0, f"less than {found[-1].tokens}")
        found.append(MeasuredSize(tokens, seconds * 1e3, ", ".join(notes)))
    return found


def decoders_ms(cost: CostModel, most: int) -> dict[int, float]:
    """Return what one token for each of so many streams takes."""
    from uma_trio.policy.cost import Work

    return {n: cost.seconds(Work(n, n)) * 1e3 for n in _DECODERS if n <= most}


def as_values(measured: Measured, most: int) -> dict[str, Any]:
    """Return all there is to say, for JSON."""
    cost = measured.cost
    return {
        "recalled": measured.recalled,
        "file": str(measured.file),
        "others_share": cost.others,
        "steps": [
            {
                "tokens": size.tokens,
                "ms": size.ms,
                "ms_per_token": size.ms_per_token,
                "tokens_per_s": size.per_s,
            }
            for size in measured_sizes(cost, most)
        ],
        "plateau": cost.plateau(most),
        "decoders_ms": decoders_ms(cost, most),
    }


def _show(about: str, measured: Measured, most: int) -> None:
    out = console()
    out.print(f"One tick of so many tokens: {about}")
    out.print(table_of(measured_sizes(measured.cost, most)))
    for line in summary(measured, most):
        out.print(line)


def table_of(found: list[MeasuredSize]) -> Table:
    """Return the sizes with a bar for the rate of each."""
    from rich.bar import Bar
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "ms", "ms/token", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", max_width=_WIDEST_BAR)
    table.add_column("", no_wrap=True, style="dim")
    best = max(size.per_s for size in found)
    for size in found:
        figures = map(_figure, (size.ms, size.ms_per_token, size.per_s))
        rate = Bar(best, 0, size.per_s, color="cyan")
        table.add_row(str(size.tokens), *figures, rate, size.note)
    return table


def summary(measured: Measured, most: int) -> list[str]:
    """Return what follows from the staircase, in sentences."""
    from uma_trio.policy.costing.neighbours import in_words

    cost = measured.cost
    ms = decoders_ms(cost, most)
    chunks = f"Without readers, background prompts go in chunks of {cost.plateau(most)}"
    lines = [
        f"{chunks}: the fewest tokens that reach 95 % of the best rate.",
        f"A person's prompt then goes in chunks of {cost.quickest(most)}, the best rate.",
        f"Decoders: {', '.join(f'{n}: {_figure(v)} ms' for n, v in ms.items())}.",
    ]
    if cost.context_cell_s:
        lines.append(
            f"Looking back at 1,000 tokens of its own adds {_figure(cost.context_cell_s * 1e6)} ms to a "
            f"token, 1,000 of others {_figure(cost.used_cell_s * 1e6)} ms."
        )
    if cost.spanned_cell_s:
        lines.append(
            f"1,000 cells that a tick spans, whosever they are, add {_figure(cost.spanned_cell_s * 1e6)} ms "
            "to it."
        )
    if 3 in ms and 4 in ms:
        if ms[4] < ms[3]:
            lines.append(
                f"Four decoders ({_figure(ms[4])} ms) cost less than three ({_figure(ms[3])} ms): "
                "policies that know what ticks cost fill the row, with ballast if need be."
            )
        else:
            more = 100 * (ms[4] / ms[3] - 1)
            lines.append(f"A fourth decoder costs {more:.0f} % more.")
    if cost.others:
        lines.append(f"Note: {in_words(cost.others)}.")
    if measured.recalled:
        lines.append(f"Recalled from {measured.file}; --fresh measures again.")
    else:
        lines.append(f"Measured now, and kept in {measured.file}.")
    return lines


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
