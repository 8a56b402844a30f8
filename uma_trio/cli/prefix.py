"""`uma-trio prefix`: the cached prefixes of this user's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from uma_trio.cli.attempt import attempt
from uma_trio.cli.output import (
    OK,
    USAGE,
    SocketFlag,
    Trouble,
    complain,
    console,
    print_json,
    socket_path,
)
from uma_trio.cli.parser import Parameter
from uma_trio.words import harmless, several, size

if TYPE_CHECKING:
    from uma_protocol import Prefixes, PrefixInfo

_LONGEST_S = 86_400


def prefix(
    action: Annotated[
        Literal["list", "clear", "pin"], Parameter(help="list, clear or pin.")
    ] = "list",
    session: Annotated[
        str | None, Parameter(help="With pin: the conversation whose latest turn is pinned.")
    ] = None,
    /,
    *,
    seconds: Annotated[int, Parameter(help="With pin: the duration; 0 removes the pin.")] = 300,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
    socket: SocketFlag = None,
) -> int:
    """List or clear the cached prefixes of your prompts, or pin a conversation."""
    if (session is not None) != (action == "pin"):
        complain("pin needs a session; list and clear take none.")
        return USAGE
    if not 0 <= seconds <= _LONGEST_S:
        complain(f"--seconds: {seconds} is out of range, 0 to {_LONGEST_S}.")
        return USAGE
    return attempt(_prefix, socket_path(socket), action, session, seconds, json)


async def _prefix(
    path: Path,
    action: Literal["list", "clear", "pin"],
    session: str | None,
    seconds: int,
    as_json: bool,
) -> int:
    import msgspec

    from uma_trio.client import Client

    pin_s = seconds if action == "pin" else None
    found = await Client(path).prefix(action, session=session, seconds=pin_s)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return OK
    for line in lines_of(found, cleared=action == "clear"):
        console().print(line, soft_wrap=True)
    if session is not None and not any(session in info.sessions for info in found.prefixes):
        raise Trouble(f"Nothing was pinned: no turn of a session {session} of yours is saved.")
    return OK


def lines_of(found: Prefixes, *, cleared: bool = False) -> list[str]:
    """Return a line for each namespace."""
    if not found.budget_bytes:
        return ["No prefixes are kept: the daemon runs with --prefix-ram 0."]
    used, budget = size(found.used_bytes), size(found.budget_bytes)
    lines = [f"Cleared: {several(found.dropped, 'token')} of the KV cache."] if cleared else []
    lines.append(f"{used} of {budget} are used by the saved prefixes of all users.")
    if found.disk_budget_bytes:
        used, budget = size(found.disk_used_bytes), size(found.disk_budget_bytes)
        lines.append(f"On disk {used} of {budget} are used, {size(found.disk_bytes)} by you.")
    return [*lines, *(_line(info) for info in found.prefixes)]


def _line(info: PrefixInfo) -> str:
    owner = "all your programs" if info.cache is None else harmless(info.cache)
    text = f"{owner}: {several(info.tokens, 'token')} saved in {several(info.pages, 'page')} ({size(info.bytes)})"
    text += f", {info.leaf_tokens:,} in the KV cache"
    if info.asked_tokens:
        there, missed = (n / info.asked_tokens for n in (info.cached_tokens, info.missed_tokens))
        text += f"; {there:.0%} of {info.asked_tokens:,} prompt tokens were cached"
        if info.missed_tokens:
            text += f", twice the --prefix-ram would have cached {missed:.0%} more"
    if info.sessions:
        text += f"; sessions: {', '.join(map(harmless, info.sessions))}"
    return text
