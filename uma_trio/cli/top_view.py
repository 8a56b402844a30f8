"""What `uma-trio top` shows. Pure: values in, a rich renderable out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import define, field, frozen

from uma_trio.words import duration, harmless, size

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    from uma_protocol import MemoryInfo, ModelInfo, SessionInfo, Sessions, TickInfo

View = Literal["requests", "models", "story"]
SORTS: Final = ("arrival", "age", "tokens/s", "prompt", "program")
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS: Final = "._-=+*#@"
_LABEL: Final = 12  # columns before the figures of the head
_HEAD: Final = 9  # lines above the table, with the empty one
_LONGEST_NAME: Final = 16
_MODEL: Final = "MODEL"  # a column only if there are several
_COLUMNS: Final = (
    "REQUEST", "PROGRAM", _MODEL, "STATE", "LANE", "PROMPT", "OUT", "TOK/S", "AGE", "WAITS FOR",
)  # fmt: skip
_LEFT: Final = {"PROGRAM", _MODEL, "STATE", "LANE", "WAITS FOR"}


@define
class Shown:
    """The daemon's state and the user's choices. `found` is None without a daemon."""

    found: Sessions | None = None
    figures: Mapping[str, Any] = field(factory=dict)
    view: View = "requests"
    sort: int = 0
    chosen: int | None = None
    story: Sequence[str] = ()
    message: str = ""
    is_unicode: bool = True

    def rows(self) -> list[SessionInfo]:
        """Return the requests in their order."""
        found = list(self.found.sessions) if self.found is not None else []
        keys: Sequence[Callable[[SessionInfo], Any]] = (
            lambda info: 0,
            lambda info: -info.age_ms,
            lambda info: -info.tokens_per_s,
            lambda info: -info.prompt_tokens,
            lambda info: info.app or "",
        )
        return sorted(found, key=keys[self.sort])

    def selected(self) -> SessionInfo | None:
        """Return the chosen request, else the first; one of another user cannot be chosen."""
        mine = [info for info in self.rows() if info.request]
        chosen = [info for info in mine if info.request == self.chosen]
        return next(iter(chosen or mine), None)

    def move(self, by: int) -> None:
        """Choose the request before or after the chosen one."""
        mine = [info.request for info in self.rows() if info.request]
        if mine:
            now = self.selected()
            at = mine.index(now.request) if now is not None else 0
            self.chosen = mine[max(0, min(len(mine) - 1, at + by))]


def render(shown: Shown, *, height: int = 0, footer: bool = True) -> RenderableType:
    """Return the picture; with a `height` the last line of the window is the footer."""
    from rich.console import Group
    from rich.layout import Layout
    from rich.text import Text

    if shown.found is None:
        lines = (_line(("uma-trio top", "bold")), _line((shown.message or "…", "red")))
        return Group(*lines)
    head = Group(*_head(shown, shown.found), Text())
    room = max(2, height - _HEAD - 1) if height else 10**6
    views: Mapping[View, Callable[[Shown, int], RenderableType]] = {
        "requests": _requests,
        "models": _models,
        "story": _story,
    }
    body = views[shown.view](shown, room)
    if not height:
        return Group(head, body, *([_foot(shown)] if footer else []))
    layout = Layout()
    layout.split_column(Layout(head, size=_HEAD), Layout(body), Layout(_foot(shown), size=1))
    return layout


def _line(*parts: tuple[str, str]) -> Text:
    from rich.text import Text

    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _head(shown: Shown, found: Sessions) -> list[RenderableType]:
    figures = shown.figures
    names = ", ".join(harmless(model.name) for model in found.models)
    return [
        _line(("uma-trio top", "bold"), (f"  {names}", "")),
        _promise(figures, shown.is_unicode),
        _named("tokens/s", _speed(figures)),
        _named("slots", _slots(figures, found)),
        _named("KV cache", "-" if found.memory is None else memory_in_words(found.memory)),
        _Bars("batch", [_tokens_of(tick) for tick in found.ticks], shown.is_unicode),
        _Bars("tick", [tick.measured_ms for tick in found.ticks], shown.is_unicode),
        _named("", _latest(found.ticks)),
    ]


def _named(name: str, text: str) -> Text:
    return _line((name.ljust(_LABEL), "dim"), (text, ""))


@frozen
class _Bars:
    """A line of bars as wide as the window."""

    name: str
    values: Sequence[float]
    is_unicode: bool

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(8, options.max_width - _LABEL)
        yield _named(self.name, spark(self.values, width, self.is_unicode))


def _promise(figures: Mapping[str, Any], is_unicode: bool) -> Text:
    """Compare the gaps of the latest second with the limit, for the model that is the furthest from it."""
    models = _of_each(figures)
    name, p95, step = max(
        ((name, _p95(each), each.get("step_ms")) for name, each in models.items()),
        key=lambda one: (one[1] is not None, (one[1] or 0.0) / (one[2] or math.inf)),
    )
    late = sum(sum((each.get("late_tokens_total") or {}).values()) for each in models.values())
    counts = [(each.get("interactive_shown_ms") or {}).get("count") for each in models.values()]
    shown = sum(filter(None, counts))
    totals = f"   {late:,} of {shown:,} late" if shown else ""
    if p95 is None or not step:
        text = "no readers" if p95 is None else f"p95 {p95:.1f} ms"
        return _named("readers", f"{text}{totals}")
    full, rest = ("█", "░") if is_unicode else ("#", ".")
    filled = min(20, round(10 * p95 / step))
    return _line(
        ("readers".ljust(_LABEL), "dim"),
        (f"p95 {p95:.1f} of {step:.1f} ms{_of_model(name)} ", "bold"),
        (full * filled, "green" if p95 <= step else "red"),
        (rest * (20 - filled), "dim"),
        (totals, ""),
    )


def _speed(figures: Mapping[str, Any]) -> str:
    """Return the rate of all models, and the first tokens of the one with the longest wait for them."""
    models = _of_each(figures)
    generated, computed = (
        _rate(models, name) for name in ("tokens_generated_per_s", "tokens_per_s")
    )
    text = (
        "-"
        if generated is None
        else f"{generated:.1f} generated, {computed or 0.0:.1f} with prompts"
    )
    firsts = {name: each.get("ttft_ms") or {} for name, each in models.items()}
    name, first = max(firsts.items(), key=lambda one: one[1].get("p95") or 0.0)
    if first.get("p95") is None:
        return text
    return f"{text}   TTFT p50 {_ms(first['p50'])}, p95 {_ms(first['p95'])}{_of_model(name)}"


def _of_each(figures: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the figures of each model; "" is the name of the only one."""
    return figures.get("models") or {"": figures}


def _p95(figures: Mapping[str, Any]) -> float | None:
    found: float | None = (figures.get("scorecard") or {}).get("interactive_p95_ms")
    return found


def _rate(models: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    found = [(each.get("scorecard") or {}).get(name) for each in models.values()]
    known = [rate for rate in found if rate is not None]
    return sum(known) if known else None


def _of_model(name: str) -> str:
    return f" ({harmless(name)})" if name else ""


def _slots(figures: Mapping[str, Any], found: Sessions) -> str:
    each = _of_each(figures).values()
    taken, total = (
        sum(filter(None, values)) if None not in values else "-"
        for values in (
            [one.get(name) for one in each] for name in ("active_sessions", "slots_total")
        )
    )
    return f"{taken} of {total} taken   {found.waiting:,} waiting"


def memory_in_words(memory: MemoryInfo) -> str:
    """Return how full the KV cache is, and how many prefixes are cached."""
    share = memory.cells_used / max(1, memory.cells_total)
    text = f"{memory.cells_used:,} of {memory.cells_total:,} cells ({share:.0%}), {memory.cells_reserved:,} reserved"
    if memory.leaves or memory.pages:
        text += f"   prefixes: {memory.leaves:,} cached, {size(memory.page_bytes)} saved"
    return text


def model_in_words(model: ModelInfo) -> str:
    """Return the state of a model, what it makes of texts, its size and context."""
    if model.state != "loaded":
        share = f" {model.progress:.0%}" if model.progress else ""
        return f"{model.state}{share}"
    return f"{model.state}, gives {model.gives}, {size(model.size_bytes)}, {model.n_ctx:,} tokens of context"


def _latest(ticks: Sequence[TickInfo]) -> str:
    if not ticks:
        return "no tick yet"
    last, longest = ticks[-1], max(tick.measured_ms for tick in ticks)
    limit = "" if last.limit_ms is None else f", limit {_ms(last.limit_ms)}"
    model = f" of {harmless(last.model)}" if last.model else ""
    return (
        f"tick {last.tick:,}{model}: {_tokens_of(last)} tokens in {_ms(last.measured_ms)}{limit}; "
        f"longest {_ms(longest)}"
    )


def _tokens_of(tick: TickInfo) -> int:
    return sum(item.tokens for item in tick.items)


def spark(values: Sequence[float], width: int, is_unicode: bool = True) -> str:
    """Return the latest `width` values as a line of bars; the highest of them fills its bar."""
    blocks = _BLOCKS if is_unicode else _ASCII_BLOCKS
    latest = values[-width:]
    most = max(latest, default=0) or 1
    return "".join(blocks[min(7, int(7.999 * value / most))] for value in latest)


def writers(models: Sequence[ModelInfo]) -> list[ModelInfo]:
    """Return the models that generate text."""
    return [model for model in models if model.gives == "text"]


def _requests(shown: Shown, height: int) -> RenderableType:
    from rich.table import Table

    rows = shown.rows()
    if not rows:
        return _line(("Nothing is running.", "dim"))
    several = shown.found is not None and len(writers(shown.found.models)) > 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        if name != _MODEL or several:
            side: Literal["left", "right"] = "left" if name in _LEFT else "right"
            longest = _LONGEST_NAME if name in ("PROGRAM", _MODEL) else None
            table.add_column(
                name, justify=side, no_wrap=True, overflow="ellipsis", max_width=longest
            )
    chosen = shown.selected()
    at = rows.index(chosen) if chosen is not None else 0
    first = max(0, min(at - (height - 2) // 2, len(rows) - (height - 1)))
    for info in rows[first : first + height - 1]:
        table.add_row(*_row(info, several=several), style="reverse" if info is chosen else "")
    return table


def _row(info: SessionInfo, *, several: bool) -> tuple[str, ...]:
    model = (harmless(info.model or ""),) if several else ()
    if not info.request:  # another user's
        return ("", info.app or "", *model, info.state, info.lane, "", "", "", "", "")
    prompt = f"{min(info.computed_tokens, info.prompt_tokens):,}/{info.prompt_tokens:,}"
    return (
        str(info.request),
        harmless(info.app or "-"),
        *model,
        info.state,
        info.lane,
        prompt,
        f"{info.completion_tokens:,}",
        f"{info.tokens_per_s:.1f}" if info.completion_tokens else "",
        duration(info.age_ms / 1e3),
        harmless(info.waits),
    )


def _models(shown: Shown, height: int) -> RenderableType:
    from rich.console import Group

    models: Sequence[ModelInfo] = shown.found.models if shown.found is not None else ()
    rows = [
        _line((harmless(model.name).ljust(30), "bold"), (f"  {model_in_words(model)}", ""))
        for model in models
    ]
    return Group(*rows[:height])


def _story(shown: Shown, _: int) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    first, *rest = shown.story or ("",)
    return Group(Text(first, "bold"), *(Padding(Text(each), (0, 0, 0, 2)) for each in rest))


def _foot(shown: Shown) -> Text:
    if shown.message:
        return _line((shown.message, "red"))
    keys = {
        "requests": f"↑↓ choose  e explain  p lane  k end  s sort by {SORTS[(shown.sort + 1) % len(SORTS)]}  "
        "m models  q quit",
        "models": "m requests  q quit",
        "story": "e requests  q quit",
    }[shown.view]
    return _line((keys if shown.is_unicode else keys.replace("↑↓", "up/down"), "dim"))


def _ms(ms: float) -> str:
    return duration(ms / 1e3) if ms >= 100 else f"{ms:.1f} ms"
