"""From what somebody typed to a model's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from uma_trio.library.reference import PullFailed, is_address, reference
from uma_trio.library.stores import Found
from uma_trio.library.weights_names import PREFERRED
from uma_trio.words import nearest

_SOURCES: Final = ("hf", "ollama", "lmstudio")


class NoSuchModel(Exception):
    """No model has that name; the message is one sentence with the nearest, and how to get one."""


def model_file(typed: str, here: Callable[[], Iterable[Found]]) -> Path:
    """Return the file of a model that was named by its path, or as `uma-trio models` calls it.

    A path wins, also one where nothing is if it looks like one: ends in .gguf, or begins with a dot, a
    slash or ~. `here` is asked for anything else only. ``hf:``, ``ollama:`` and ``lmstudio:`` before a name
    say who keeps it. An address of the hub names what was fetched from there.

    Raises:
        NoSuchModel: it is neither.
    """
    path = Path(typed).expanduser()
    looks_like_one = typed.lower().endswith(".gguf") and not is_address(typed)
    if looks_like_one or typed.startswith((".", "/", "~")) or path.exists():
        return path
    source, _, name = typed.partition(":")
    if source not in _SOURCES:
        source, name = "", typed
    found = [model for model in here() if source in ("", model.source)]
    matching = _matching(name, found) or _at_address(typed, found)
    if matching:
        return matching[0].path
    raise NoSuchModel(_no_such(typed, name, found))


def _matching(name: str, found: Sequence[Found]) -> list[Found]:
    """Return the models that a name may mean, the best first: the whole name, or all but owner or tag."""
    wanted = name.lower()
    rules: tuple[Callable[[str], bool], ...] = (
        lambda each: each == wanted,
        lambda each: each.partition(":")[0] == wanted,
        lambda each: each.rpartition("/")[2] == wanted,
        lambda each: each.rpartition("/")[2].partition(":")[0] == wanted,
    )
    for rule in rules:
        fitting = [model for model in found if rule(model.name.lower())]
        if fitting:
            return sorted(fitting, key=_preference)
    return []


def _at_address(typed: str, found: Sequence[Found]) -> list[Found]:
    """Return the models of the hub that an address leads to, the best first."""
    try:
        asked = reference(typed) if is_address(typed) else None
    except PullFailed:
        asked = None
    if asked is None:
        return []
    found = [model for model in found if model.source == "hf"]
    if asked.path:
        suffix = f"/{asked.path}"
        found = [model for model in found if str(model.path).endswith(suffix)]
    return _matching(str(asked), found)


def _preference(model: Found) -> tuple[int, str]:
    tag = model.name.rpartition(":")[2]
    order = (*PREFERRED, "latest")
    return (order.index(tag) if tag in order else len(order), model.name)


def _no_such(typed: str, name: str, found: Sequence[Found]) -> str:
    hint = nearest(name, [model.name for model in found], cutoff=0.5)
    get = f"fetch it with `uma-trio pull {name}`" if "/" in name else "name a GGUF file"
    return (
        f"There is no model {typed!r} here{hint}; `uma-trio models` lists those that are, or {get}."
    )
