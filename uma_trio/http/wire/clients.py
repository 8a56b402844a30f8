"""What a program calls itself: a label for people, which grants nothing."""

from __future__ import annotations

from uma_trio.http.wire.message import Head

_LABEL = 64


def label(head: Head) -> str | None:
    """Return what a program calls itself: ``X-UMA-App``, or the first word of its User-Agent."""
    named = head.headers.get("x-uma-app")
    if named is None:
        named = head.headers.get("user-agent", "").partition(" ")[0]
    shown = "".join(letter for letter in named if letter.isprintable())[:_LABEL]
    return shown or None
