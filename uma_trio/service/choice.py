"""Which model a request is for: by the name that it has, or by what it wants made of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from uma_protocol.errors import Code
from uma_trio.service.ask import Refusal
from uma_trio.words import Gives, nearest

_ANY_TAG: Final = ":latest"  # clients of Ollama's API put it behind a name without a tag
_LONGEST: Final = 256  # characters of a name in a message
_DOES: Final[Mapping[Gives, str]] = {
    "text": "writes text",
    "vectors": "makes vectors of texts",
    "scores": "scores documents for a query",
}
_ASKED_BY: Final[Mapping[Gives, str]] = {
    "text": "/v1/chat/completions, or uma-trio run",
    "vectors": "/v1/embeddings, or uma-trio embed",
    "scores": "/v1/rerank, or uma-trio rerank",
}
_STARTED_BY: Final[Mapping[Gives, str]] = {
    "text": "--model MODEL",
    "vectors": "--embedding-model MODEL",
    "scores": "--rerank-model MODEL",
}


class Choosable(Protocol):
    """A model, loaded or not."""

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it; the first one is shown."""

    @property
    def configured(self) -> tuple[str, ...]:
        """Those of them that the operator gave it; the others are its file's."""

    @property
    def gives(self) -> Gives:
        """What it makes of a text."""

    @property
    def hidden(self) -> bool:
        """Whether it is left out of lists."""


One = TypeVar("One", bound=Choosable)


def called(
    name: str,
    models: Sequence[One],
    gives: Gives | None,
    variant: Callable[[str, Sequence[One]], One | None] = lambda _name, _models: None,
) -> One | None:
    """Return the model of this name, loaded or not. This is the one place where a name becomes a model.

    Names from the configuration come first, those from files after all of them: a file cannot take the name of another
    model. Where several files have the name, it is the first model that `gives` what is asked. Behind each kind of name the
    same is looked up without the tag ``:latest``, and `variant` finds a model with adapters, of those that it gets.

    Raises:
        Refusal: what `variant` raises, if no model has the name.
    """
    refused: Refusal | None = None
    for is_configured in (True, False):
        for each in dict.fromkeys((name, name.removesuffix(_ANY_TAG))):
            named = partial(_has, each, is_configured=is_configured)
            if found := [one for one in models if named(one)]:
                return next((one for one in found if gives in (None, one.gives)), found[0])
            base = each.rpartition(":")[0]
            bases = [one for one in models if _has(base, one, is_configured=is_configured)]
            try:
                if bases and (made := variant(each, bases)) is not None:
                    return made
            except Refusal as refusal:
                refused = refused or refusal
    if refused is not None:
        raise refused
    return None


def _has(name: str, one: Choosable, *, is_configured: bool) -> bool:
    return name in (one.configured if is_configured else one.names)


def instead(
    models: Sequence[One], name: str | None, gives: Gives | None, *, exact: bool = False
) -> One | None:
    """Return the model of a request that names none, or one that is not there.

    Who names none gets the first that gives what is asked; without `gives` that is text, if any model does. Any name is that of
    the only one, but not if it has to be `exact`.
    """
    those = [one for one in models if one.gives == (gives or "text")]
    if not those and gives is None:
        those = list(models)
    if name is None:
        return those[0] if those else None
    return those[0] if len(those) == 1 and not exact else None


def mismatch(one: Choosable, gives: Gives, models: Sequence[Choosable]) -> Refusal:
    """Return the refusal of a request that wants something else than this model makes."""
    others = [each.names[0] for each in models if each.gives == gives]
    else_ = f"; {_listed(others)} {_DOES[gives]}" if others else ""
    why = f"{one.names[0]} {_DOES[one.gives]}, and nothing else: ask it by {_ASKED_BY[one.gives]}{else_}"
    return Refusal(Code.E_MODEL_002, why)


def none_gives(gives: Gives, models: Sequence[Choosable]) -> Refusal:
    """Return the refusal of a request where no model gives what is asked."""
    here = "; ".join(f"{each.names[0]} {_DOES[each.gives]}" for each in models)
    why = f"no model of this daemon {_DOES[gives]}: start it with {_STARTED_BY[gives]}"
    return Refusal(Code.E_MODEL_002, f"{why} ({here})" if here else why)


def unknown(name: str, models: Sequence[Choosable]) -> Refusal:
    """Return the refusal of a name that no model has; `models` are those that may be named."""
    near = nearest(name, [each for one in models for each in one.names])
    why = f"no model is called {name[:_LONGEST]}{near}; this daemon serves "
    return Refusal(Code.E_MODEL_002, why + _listed([one.names[0] for one in models]), field="model")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))
