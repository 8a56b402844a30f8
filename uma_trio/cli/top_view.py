"""What `uma-trio top` shows, as lines of styled text. Pure: values in, lines out."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import define, field

from uma_trio.words import duration, harmless, size

if TYPE_CHECKING:
    from uma_protocol import MemoryInfo, ModelInfo, SessionInfo, Sessions, TickInfo

Style = Literal["", "bold", "dim", "bad", "good", "chosen"]
Line = Sequence[tuple[str, Style]]
View = Literal["requests", "models", "story"]
SORTS: Final = ("arrival", "age", "tokens/s", "prompt", "program")
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS: Final = "._-=+*#@"
_LABEL: Final = 12  # columns before the figures of the head


@define
class Shown:
    """What there is to show, and how a person wants to see it. `found` is None without a daemon."""

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
        """Return the chosen request, the first one if none is; one of another user cannot be chosen."""
        mine = [info for info in self.rows() if info.request]
        chosen = [info for info in mine if info.request == self.chosen]
        return next(iter(chosen or mine), None)

    def move(self, by: int) -> None:
        """Choose the request before or behind the chosen one."""
        mine = [info.request for info in self.rows() if info.request]
        if mine:
            now = self.selected()
            at = mine.index(now.request) if now is not None else 0
            self.chosen = mine[max(0, min(len(mine) - 1, at + by))]


def frame(shown: Shown, width: int, height: int) -> list[str]:
    """Return the lines that fill a window, without styles."""
    return ["".join(text for text, _ in line).rstrip() for line in lines(shown, width, height)]


def lines(shown: Shown, width: int, height: int) -> list[Line]:
    """Return at most `height` lines of at most `width` columns."""
    if shown.found is None:
        body: list[Line] = [[("uma-trio top", "bold")], [(shown.message or "…", "bad")]]
        return [_cut(line, width) for line in body[:height]]
    head = _head(shown, shown.found, width)
    room = max(0, height - len(head) - 2)
    views = {"requests": _requests, "models": _models, "story": _story}
    body = views[shown.view](shown, width, room)
    filled = [*head, [], *body]
    filled += [[]] * (height - 1 - len(filled))
    return [_cut(line, width) for line in [*filled[: height - 1], _foot(shown)]]


def _head(shown: Shown, found: Sessions, width: int) -> list[Line]:
    figures, room = shown.figures, max(8, width - _LABEL)
    names = ", ".join(harmless(model.name) for model in found.models)
    return [
        [("uma-trio top", "bold"), (f"  {names}", "")],
        _promise(figures, shown.is_unicode),
        _named("tokens/s", _speed(figures)),
        _named("slots", _slots(figures, found)),
        _named("KV cache", "-" if found.memory is None else memory_in_words(found.memory)),
        _named("batch", spark([_rows_of(tick) for tick in found.ticks], room, shown.is_unicode)),
        _named("tick", spark([tick.measured_ms for tick in found.ticks], room, shown.is_unicode)),
        _named("", _latest(found.ticks)),
    ]


def _named(name: str, text: str) -> Line:
    return [(name.ljust(_LABEL), "dim"), (text, "")]


def _promise(figures: Mapping[str, Any], is_unicode: bool) -> Line:
    """Say what readers got in the latest second, against what is promised: those of the model that is the furthest from it."""
    models = _of_each(figures)
    name, p95, step = max(
        ((name, _p95(each), each.get("step_ms")) for name, each in models.items()),
        key=lambda one: (one[1] is not None, (one[1] or 0.0) / (one[2] or math.inf)),
    )
    late = sum(sum((each.get("late_tokens_total") or {}).values()) for each in models.values())
    counts = [(each.get("interactive_shown_ms") or {}).get("count") for each in models.values()]
    shown = sum(filter(None, counts))
    totals = f"   {late:,} of {shown:,} tokens late beside other work" if shown else ""
    if p95 is None or not step:
        said = "nobody reads" if p95 is None else f"p95 {p95:.1f} ms"
        return [("readers".ljust(_LABEL), "dim"), (f"{said}{totals}", "")]
    full, rest = ("█", "░") if is_unicode else ("#", ".")
    filled = min(20, round(10 * p95 / step))
    kept: Style = "good" if p95 <= step else "bad"
    return [
        ("readers".ljust(_LABEL), "dim"),
        (f"p95 {p95:.1f} of {step:.1f} ms{_named_model(name)} ", "bold"),
        (full * filled, kept),
        (rest * (20 - filled), "dim"),
        (totals, ""),
    ]


def _speed(figures: Mapping[str, Any]) -> str:
    """Say what all models compute together, and the first tokens of the one where these take longest."""
    models = _of_each(figures)
    made, computed = (_rate(models, name) for name in ("tokens_generated_per_s", "tokens_per_s"))
    text = "-" if made is None else f"{made:.1f} generated, {computed or 0.0:.1f} with prompts"
    firsts = {name: each.get("ttft_ms") or {} for name, each in models.items()}
    name, first = max(firsts.items(), key=lambda one: one[1].get("p95") or 0.0)
    if first.get("p95") is None:
        return text
    said = f"first token p50 {_ms(first['p50'])}, p95 {_ms(first['p95'])}"
    return f"{text}   {said}{_named_model(name)}"


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


def _named_model(name: str) -> str:
    return f" ({harmless(name)})" if name else ""


def _slots(figures: Mapping[str, Any], found: Sessions) -> str:
    each = _of_each(figures).values()
    sums = [
        sum(filter(None, found)) if None not in found else "-"
        for found in (
            [one.get(name) for one in each] for name in ("active_sessions", "slots_total")
        )
    ]
    taken, total = sums
    return f"{taken} of {total} taken   {found.waiting:,} waiting"


def memory_in_words(memory: MemoryInfo) -> str:
    """Return how full the KV cache is, and which prefixes are kept."""
    share = memory.cells_used / max(1, memory.cells_total)
    text = f"{memory.cells_used:,} of {memory.cells_total:,} cells ({share:.0%}), {memory.cells_reserved:,} reserved"
    if memory.leaves or memory.pages:
        text += f"   prefixes: {memory.leaves:,} cached, {size(memory.page_bytes)} saved"
    return text


def _latest(ticks: Sequence[TickInfo]) -> str:
    if not ticks:
        return "no tick yet"
    last, longest = ticks[-1], max(tick.measured_ms for tick in ticks)
    limit = "" if last.limit_ms is None else f", limit {_ms(last.limit_ms)}"
    n = len(ticks)
    whose = f" of {harmless(last.model)}" if last.model else ""
    return f"tick {last.tick:,}{whose}: {_rows_of(last)} tokens in {_ms(last.measured_ms)}{limit}; longest of {n}: {_ms(longest)}"


def _rows_of(tick: TickInfo) -> int:
    return sum(item.tokens for item in tick.items)


def spark(values: Sequence[float], width: int, is_unicode: bool = True) -> str:
    """Return the latest `width` values as a line of bars; the highest of them fills its bar."""
    blocks = _BLOCKS if is_unicode else _PLAIN_BLOCKS
    latest = values[-width:]
    most = max(latest, default=0) or 1
    return "".join(blocks[min(7, int(7.999 * value / most))] for value in latest)


_MODEL: Final = "MODEL"  # only where there are several
_COLUMNS: Final = (
    "REQUEST",
    "PROGRAM",
    _MODEL,
    "STATE",
    "LANE",
    "PROMPT",
    "OUT",
    "TOK/S",
    "AGE",
    "WAITS FOR",
)
_LEFT: Final = {"PROGRAM", _MODEL, "STATE", "LANE", "WAITS FOR"}


def writers(models: Sequence[ModelInfo]) -> list[ModelInfo]:
    """Return the models that write text."""
    return [model for model in models if model.gives == "text"]


def _requests(shown: Shown, width: int, height: int) -> list[Line]:
    rows = shown.rows()
    if not rows:
        return [[("Nothing is running.", "dim")]]
    several = shown.found is not None and len(writers(shown.found.models)) > 1
    head_row = _COLUMNS if several else tuple(name for name in _COLUMNS if name != _MODEL)
    cells = [_row(info, several=several) for info in rows]
    sizes = [max(len(name), *(columns(row[n]) for row in cells)) for n, name in enumerate(head_row)]
    sizes[1] = min(sizes[1], 16)
    if several:
        sizes[2] = min(sizes[2], 16)
    named = [
        name.ljust(n) if name in _LEFT else name.rjust(n)
        for name, n in zip(head_row, sizes, strict=True)
    ]
    head: Line = [("  ".join(named), "dim")]
    chosen = shown.selected()
    at = rows.index(chosen) if chosen is not None else 0
    first = max(0, min(at - (height - 2) // 2, len(rows) - (height - 1)))
    found: list[Line] = [head]
    for info, row in list(zip(rows, cells, strict=True))[first : first + height - 1]:
        text = "  ".join(
            _padded(cell, n, left=name in _LEFT)
            for cell, n, name in zip(row, sizes, head_row, strict=True)
        )
        found.append([(text.ljust(width), "chosen")] if info is chosen else [(text.rstrip(), "")])
    return found


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


def _models(shown: Shown, width: int, height: int) -> list[Line]:
    models: Sequence[ModelInfo] = shown.found.models if shown.found is not None else ()
    rows: list[Line] = [
        [
            (harmless(model.name).ljust(30), "bold"),
            (
                f"  {model.state}, gives {model.gives}, {size(model.size_bytes)}, {model.n_ctx:,} tokens of context",
                "",
            ),
        ]
        for model in models
    ]
    return rows[:height]


def _story(shown: Shown, width: int, height: int) -> list[Line]:
    told: list[Line] = []
    for n, sentence in enumerate(shown.story):
        indent = "  " if n else ""
        told += [
            [(line, "" if n else "bold")]
            for line in textwrap.wrap(
                sentence, max(20, width), initial_indent=indent, subsequent_indent=indent + "  "
            )
        ]
    return told[:height]


def _foot(shown: Shown) -> Line:
    if shown.message:
        return [(shown.message, "bad")]
    keys = {
        "requests": f"↑↓ choose  e explain  p lane  k end  s sort by {SORTS[(shown.sort + 1) % len(SORTS)]}  m models  q quit",
        "models": "m requests  q quit",
        "story": "e requests  q quit",
    }[shown.view]
    return [(keys if shown.is_unicode else keys.replace("↑↓", "up/down"), "dim")]


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


def _padded(text: str, n: int, *, left: bool) -> str:
    cut = _shortened(text, n)
    space = " " * (n - columns(cut))
    return cut + space if left else space + cut


def _shortened(text: str, n: int) -> str:
    if columns(text) <= n:
        return text
    while text and columns(text) > n - 1:
        text = text[:-1]
    return f"{text}…"


def _cut(line: Line, width: int) -> Line:
    """Return as much of a line as fits."""
    fitting, left = [], width
    for text, style in line:
        part = text if columns(text) <= left else _shortened(text, left)
        fitting.append((part, style))
        left -= columns(part)
        if left <= 0:
            break
    return fitting


def _ms(ms: float) -> str:
    return duration(ms / 1e3) if ms >= 100 else f"{ms:.1f} ms"
