"""Names of models: the only place where the name in a request becomes a model, and the name of a variant its adapters. Pure.

A *variant* is a model with some of its LoRA adapters. Scales are rounded to 0.01 so that a client cannot request an
unbounded number of variants. A variant is called MODEL:ADAPTERS, with the adapters in the order of their declaration:
``chat:polite``, or ``chat:polite=0.5+formal`` where a scale differs from the declared one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from attrs import evolve

from uma_protocol.errors import Code
from uma_trio.backend.base import Adapter
from uma_trio.models.refusal import Refusal
from uma_trio.words import Gives, nearest

if TYPE_CHECKING:
    from uma_trio.models.model import Model

MAX_SCALE: Final = 100.0
_ANY_TAG: Final = ":latest"  # clients of Ollama's API append it to a name without a tag
_MAX_SHOWN: Final = 256  # characters of a name in a message
_DOES: Final[Mapping[Gives, str]] = {
    "text": "writes text",
    "vectors": "makes vectors of texts",
    "scores": "scores documents for a query",
}
_ENDPOINTS: Final[Mapping[Gives, str]] = {
    "text": "/v1/chat/completions, or uma-trio run",
    "vectors": "/v1/embeddings, or uma-trio embed",
    "scores": "/v1/rerank, or uma-trio rerank",
}
_OPTIONS: Final[Mapping[Gives, str]] = {
    "text": "--model MODEL",
    "vectors": "--embedding-model MODEL",
    "scores": "--rerank-model MODEL",
}


def find_by_name(
    name: str,
    models: Sequence[Model],
    kind: Gives | None,
    variant: Callable[[str, Model], Model | None],
) -> Model | None:
    """Return the model of this name.

    Names from the configuration take precedence over names from files, so no file can take the name of another model.
    If several files have the name, the first model of the requested `kind` is meant. For each source of names
    the tag ``:latest`` is optional, and `variant` resolves ADAPTERS of MODEL:ADAPTERS.

    Raises:
        Refusal: no model has the name, and `variant` refused it.
    """
    refused: Refusal | None = None
    sources: tuple[Callable[[Model], tuple[str, ...]], ...] = (
        lambda model: model.configured_names,
        lambda model: model.names,
    )
    for names in sources:
        for each in dict.fromkeys((name, name.removesuffix(_ANY_TAG))):
            if found := [model for model in models if each in names(model)]:
                return next((model for model in found if kind in (None, model.kind)), found[0])
            base_name, _, adapters = each.rpartition(":")
            bases = [
                model for model in models if base_name in names(model) and model.known_adapters
            ]
            if not bases or adapters == "latest":
                continue
            try:
                return variant(adapters, bases[0])
            except Refusal as refusal:
                refused = refused or refusal
    if refused is not None:
        raise refused
    return None


def substitute(
    models: Sequence[Model], name: str | None, kind: Gives | None, *, exact: bool
) -> Model | None:
    """Return the model for a request without a `name`, or with one that no model has.

    Without a name it is the first model of the requested `kind`; any kind means text, if there is such a model. Unless
    the name has to be `exact`, any name means the only model of that kind.
    """
    found = [model for model in models if model.kind == (kind or "text")]
    if not found and kind is None:
        found = list(models)
    if name is None:
        return found[0] if found else None
    return found[0] if len(found) == 1 and not exact else None


def refuse(
    found: Model | None, name: str | None, kind: Gives | None, models: Sequence[Model]
) -> Refusal:
    """Return the refusal of a request for a model that was not `found`, or is not of the requested `kind`.

    The message names those of the `models` that are not hidden.
    """
    if found is not None and kind is not None:
        return _wrong_kind(found, kind, models)
    if kind is not None and all(model.kind != kind for model in models):
        return no_model_of(kind, models)
    those = [model for model in _visible(models) if kind in (None, model.kind)]
    near = nearest(name or "", [each for model in those for each in model.names])
    why = f"no model is called {(name or '')[:_MAX_SHOWN]}{near}; this daemon serves "
    return Refusal(Code.E_MODEL_002, why + _listed(those), field="model")


def no_model_of(kind: Gives, models: Sequence[Model]) -> Refusal:
    """Return the refusal of a request whose kind of output no model has."""
    here = "; ".join(f"{model.names[0]} {_DOES[model.kind]}" for model in _visible(models))
    why = f"no model of this daemon {_DOES[kind]}: start it with {_OPTIONS[kind]}"
    return Refusal(Code.E_MODEL_002, f"{why} ({here})" if here else why)


def _wrong_kind(found: Model, kind: Gives, models: Sequence[Model]) -> Refusal:
    others = [model for model in _visible(models) if model.kind == kind]
    instead = f"; {_listed(others)} {_DOES[kind]}" if others else ""
    return Refusal(
        Code.E_MODEL_002,
        f"{found.names[0]} {_DOES[found.kind]}, and nothing else: ask it by {_ENDPOINTS[found.kind]}{instead}",
    )


def _visible(models: Iterable[Model]) -> list[Model]:
    return [model for model in models if not model.is_hidden]


def _listed(models: Iterable[Model]) -> str:
    return ", ".join(dict.fromkeys(model.names[0] for model in models))


def variant_suffix(adapters: Sequence[Adapter], known: Sequence[Adapter]) -> str:
    """Return ADAPTERS of a variant's name; "" is the model itself."""
    declared = {each.name: each.scale for each in known}
    return "+".join(
        each.name if each.scale == declared.get(each.name) else f"{each.name}={each.scale:g}"
        for each in adapters
    )


def adapters_by_name(text: str, known: Sequence[Adapter]) -> tuple[Adapter, ...]:
    """Parse ADAPTERS of a variant's name.

    Raises:
        Refusal: no such adapter, or a scale that is no number.
    """
    scales: dict[str, float] = {}
    declared = {each.name: each.scale for each in known}
    for part in text.split("+"):
        name, has_scale, scale = part.partition("=")
        if name not in declared:
            raise Refusal(Code.E_MODEL_002, _unknown_adapter(name, declared), field="model")
        try:
            scales[name] = _rounded(float(scale) if has_scale else declared[name])
        except ValueError:
            why = f"{scale[:64]} is no scale of {name}"
            raise Refusal(Code.E_MODEL_002, why, field="model") from None
    return _scaled(scales, known)


def adapters_by_list(
    requested: Sequence[Mapping[str, object]], known: Sequence[Adapter]
) -> tuple[Adapter, ...]:
    """Parse llama-server's list of adapters: ``[{"id": 0, "scale": 0.5}]``, or ``name`` for ``id``. Others are not used.

    Raises:
        Refusal: it is no such list, or names an adapter that does not exist.
    """
    scales: dict[str, float] = {}
    declared = {each.name: each.scale for each in known}
    for each in requested:
        name, number = each.get("name"), each.get("id")
        if name is None and isinstance(number, int) and not isinstance(number, bool):
            if not 0 <= number < len(known):
                why = f"there is no adapter {number}; {_declared(declared)}"
                raise Refusal(Code.E_MODEL_002, why, field="lora")
            name = known[number].name
        if name is None:
            raise Refusal(Code.E_PROTO_003, "an adapter needs `id` or `name`", field="lora")
        if not isinstance(name, str) or name not in declared:
            raise Refusal(Code.E_MODEL_002, _unknown_adapter(str(name), declared), field="lora")
        scale = each.get("scale", declared[name])
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise Refusal(Code.E_PROTO_003, f"the scale of {name} is no number", field="lora")
        try:
            scales[name] = _rounded(scale)
        except ValueError as error:
            raise Refusal(Code.E_PROTO_003, f"the scale of {name} {error}", field="lora") from None
    return _scaled(scales, known)


def _scaled(scales: Mapping[str, float], known: Sequence[Adapter]) -> tuple[Adapter, ...]:
    return tuple(evolve(each, scale=scales[each.name]) for each in known if scales.get(each.name))


def _rounded(scale: float) -> float:
    if not abs(scale) <= MAX_SCALE:
        raise ValueError(f"must be {-MAX_SCALE:g} to {MAX_SCALE:g}")
    return round(float(scale), 2)


def _unknown_adapter(name: str, declared: Mapping[str, float]) -> str:
    return f"no adapter is called {name[:64]}{nearest(name, list(declared))}; {_declared(declared)}"


def _declared(declared: Mapping[str, float]) -> str:
    return f"there are {', '.join(declared)}" if declared else "the model has none"
