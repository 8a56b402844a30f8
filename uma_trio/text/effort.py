"""How a template is told whether, and how much, the model should reason: found out by rendering prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from attrs import evolve, field, frozen

from uma_trio.text.template import SWITCHES, Manner

_MEASURES: Final = ("reasoning_effort", "thinking_effort")
_WORDS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NONE: Final = "no_think"  # another word for "none": Hy3
# A template in harmony writes any word; the model knows these.
# https://cookbook.openai.com/articles/openai-harmony
_HARMONY: Final = ("low", "medium", "high")

Render = Callable[[Mapping[str, Any]], str]
"""Renders a prompt with these variables; "" if the template refuses them."""


@frozen
class Efforts:
    """What a template understands of reasoning.

    `switches` are the variables that turn it on and off, `by_default` its state without them (None: no
    switch). `words` maps, for each variable of the amount, a request's words to the template's.
    """

    switches: tuple[str, ...] = ()
    by_default: bool | None = None
    words: Mapping[str, Mapping[str, str]] = field(factory=dict)

    def told(self, manner: Manner) -> Manner:
        """Return a manner with these arguments; those of the request have precedence."""
        told: dict[str, Any] = {}
        if manner.reasons is not None:
            told |= {name: SWITCHES[name][not manner.reasons] for name in self.switches}
        word = "none" if manner.effort is None and manner.thinks is False else manner.effort
        for name, words in self.words.items():
            if word is not None and word in words:
                told[name] = words[word]
        return evolve(manner, arguments={**told, **manner.arguments})


def efforts_of(render: Render, source: str, *, harmony: bool) -> Efforts:
    """Probe a template. Renders at most 27 prompts."""
    plain = render({})
    switches: list[str] = []
    by_default: bool | None = None
    for name in _named(SWITCHES, source):
        on, off = [render({name: value}) for value in SWITCHES[name]]
        if on and off and on != off:
            switches.append(name)
            by_default = {on: True, off: False}.get(plain, by_default)
    words: dict[str, dict[str, str]] = {}
    for name in _named(_MEASURES, source):
        turned_on = {switch: SWITCHES[switch][0] for switch in switches}
        taken = _HARMONY if harmony else [w for w in _WORDS if render({**turned_on, name: w})]
        words[name] = _nearest(taken, switched=bool(switches))
        if not harmony and "none" not in taken and render({**turned_on, name: _NONE}):
            words[name] |= {"none": _NONE}
    return Efforts(tuple(switches), by_default, words)


def _named(names: Iterable[str], source: str) -> list[str]:
    return [name for name in names if re.search(rf"\b{name}\b", source)]


def _nearest(taken: Sequence[str], *, switched: bool) -> dict[str, str]:
    """Return for each word the nearest one of `taken`, of two the larger one; only "none" becomes "none"."""
    places = [_WORDS.index(word) for word in taken if word != "none"]
    found: dict[str, str] = {}
    for place, word in enumerate(_WORDS):
        if word in taken:
            found[word] = word
        elif places and (word != "none" or not switched):
            found[word] = _WORDS[min(places, key=lambda other: (abs(other - place), -other))]
    return found
