"""`uma-trio ps` and `uma-trio priority`: the requests in progress, and their lanes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from uma_trio.cli.attempt import attempt
from uma_trio.cli.output import (
    OK,
    JsonFlag,
    SocketFlag,
    WaitFlag,
    console,
    print_json,
    say,
    socket_path,
)
from uma_trio.cli.parser import Parameter
from uma_trio.cli.top_view import memory_in_words, model_in_words, writers
from uma_trio.words import Lane, duration, harmless

if TYPE_CHECKING:
    from collections.abc import Iterator

    from uma_protocol import SessionInfo, Sessions


def ps(*, json: JsonFlag = False, socket: SocketFlag = None, wait: WaitFlag = True) -> int:
    """Show the requests in progress, the KV cache and the models. JSON has the requests; see also `uma-trio top`."""
    path = socket_path(socket)
    return attempt(_ps, path, json, wait_at=path if wait else None)


def priority(
    request: Annotated[
        int, Parameter(help="The daemon's handle of a request, as `uma-trio ps` shows it.")
    ],
    lane: Annotated[Lane, Parameter(help="The lane to move it to.")],
    /,
    *,
    socket: SocketFlag = None,
) -> int:
    """Move a request to another lane."""
    return attempt(_priority, socket_path(socket), request, lane)


async def _priority(path: Path, request: int, lane: Lane) -> int:
    from uma_trio.client import Client

    await Client(path).set_priority(request, lane)
    say(f"Request {request} is in the {lane} lane.")
    return OK


async def _ps(path: Path, as_json: bool) -> int:
    import msgspec

    from uma_trio.client import Client

    found = await Client(path).overview()
    if as_json:
        print_json(msgspec.to_builtins(found.sessions))
        return OK
    if found.sessions:
        _table(found.sessions, several_models=len(writers(found.models)) > 1)
    else:
        console().print("Nothing is running.")
    for line in _rest(found):
        console().print(line, soft_wrap=True)
    return OK


def _rest(found: Sessions) -> Iterator[str]:
    """Yield the lines below the requests: what they wait for, memory, models."""
    for info in found.sessions:
        if info.waits:
            yield f"Request {info.request}: {harmless(info.waits)}"
    if (memory := found.memory) is not None:
        yield f"KV cache: {memory_in_words(memory)}"
    for model in found.models:
        yield f"Model {harmless(model.name)}: {model_in_words(model)}"


def _table(sessions: tuple[SessionInfo, ...], *, several_models: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    ahead = any(info.ahead_ms for info in sessions)
    several = any(info.choice for info in sessions)
    answers = any(info.awaits == "answer" for info in sessions)
    more = (
        *(_MODEL if several_models else ()),
        *(_AHEAD if ahead else ()),
        *(_CHOICE if several else ()),
        *(_AWAITS if answers else ()),
    )
    # A narrow window has no room for two names: the label stays, and the process has its id.
    left_out = {"PROCESS"} if console().width < _ROOMY else set()
    for heading, side in (*_COLUMNS, *more):
        if heading in left_out:
            continue
        # In a narrow window the names are cut, so that no figure is.
        whole = heading not in {"APP", "PROCESS", "MODEL"}
        table.add_column(heading, justify="right" if side == "right" else "left", no_wrap=whole)
    for info in sessions:
        cells = list(_row(info))
        if several_models:
            cells.append(harmless(info.model or "-"))
        if ahead:
            cells.append(f"{info.ahead_ms:.0f} ms")
        if several:
            cells.append(str(info.choice))
        if answers:
            cells.append(info.awaits)
        shown = [
            Text(cell, no_wrap=True, overflow="ellipsis")
            for (heading, _), cell in zip((*_COLUMNS, *more), cells, strict=True)
            if heading not in left_out
        ]
        table.add_row(*shown)
    console().print(table)


_COLUMNS = (
    ("REQUEST", "right"),
    ("APP", "left"),
    ("PROCESS", "left"),
    ("PID", "right"),
    ("STATE", "left"),
    ("LANE", "left"),
    ("PROMPT", "right"),
    ("OUT", "right"),
    ("TOKENS/S", "right"),
    ("AGE", "right"),
)
_ROOMY = 100  # columns in which every heading fits beside two names of eight characters
_MODEL = (("MODEL", "left"),)  # only if there are several
_AHEAD = (("AHEAD", "right"),)  # computed ahead of what readers are shown; only if any is
_AWAITS = (("AWAITS", "left"),)  # only if a client waits for the end of an answer
_CHOICE = (("CHOICE", "right"),)  # only if a request has several answers


def _row(info: SessionInfo) -> tuple[str, ...]:
    return (
        str(info.request),
        harmless(info.app or "-"),
        _process_name(info.pid),
        str(info.pid or "-"),
        info.state,
        info.lane,
        f"{min(info.computed_tokens, info.prompt_tokens)}/{info.prompt_tokens}",
        str(info.completion_tokens),
        f"{info.tokens_per_s:.1f}",
        duration(info.age_ms / 1e3),
    )


def _process_name(pid: int | None) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "-"
    return harmless(name).strip()
