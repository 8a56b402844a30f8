"""Which LoRA adapters a request asks for: by the name of a model, or by a list. Pure.

A *variant* is a model with some of its adapters, each with a scale. Scales are rounded to 0.01, so that a
client cannot ask for endless many. The name of a variant is that of the model, a colon, and its adapters in the order of
their declaration: ``chat:polite``, or ``chat:polite=0.5+formal`` where a scale is not the declared one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import evolve

from uma_protocol.errors import Code
from uma_trio.backend.base import Adapter
from uma_trio.service.ask import Refusal
from uma_trio.words import nearest

MOST_SCALE: Final = 100.0


def name_of(adapters: Sequence[Adapter], known: Sequence[Adapter]) -> str:
    """Return what stands behind the colon of a variant's name; "" is the model itself."""
    declared = {each.name: each.scale for each in known}
    return "+".join(
        each.name if each.scale == declared.get(each.name) else f"{each.name}={each.scale:g}"
        for each in adapters
    )


def by_name(text: str, known: Sequence[Adapter]) -> tuple[Adapter, ...]:
    """Return the adapters that `text`, what stands behind a colon, names.

    Raises:
        Refusal: there is no such adapter, or a scale is no number.
    """
    scales: dict[str, float] = {}
    declared = {each.name: each.scale for each in known}
    for part in text.split("+"):
        name, has_scale, scale = part.partition("=")
        if name not in declared:
            raise Refusal(Code.E_MODEL_002, _unknown(name, declared), field="model")
        try:
            scales[name] = _rounded(float(scale) if has_scale else declared[name])
        except ValueError:
            raise Refusal(
                Code.E_MODEL_002, f"{scale[:64]} is no scale of {name}", field="model"
            ) from None
    return _wanted(scales, known)


def by_list(asked: Sequence[Mapping[str, object]], known: Sequence[Adapter]) -> tuple[Adapter, ...]:
    """Return the adapters of llama-server's list: ``[{"id": 0, "scale": 0.5}]``, or with ``name`` for ``id``.

    What is not in it is not used.

    Raises:
        Refusal: the list is no such list, or names what is not there.
    """
    scales: dict[str, float] = {}
    declared = {each.name: each.scale for each in known}
    for each in asked:
        name = each.get("name")
        number = each.get("id")
        if name is None and isinstance(number, int) and not isinstance(number, bool):
            if not 0 <= number < len(known):
                raise Refusal(
                    Code.E_MODEL_002,
                    f"there is no adapter {number}; {_told(declared)}",
                    field="lora",
                )
            name = known[number].name
        if name is None:
            raise Refusal(Code.E_PROTO_003, "an adapter needs `id` or `name`", field="lora")
        if not isinstance(name, str) or name not in declared:
            raise Refusal(Code.E_MODEL_002, _unknown(str(name), declared), field="lora")
        scale = each.get("scale", declared[name])
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise Refusal(Code.E_PROTO_003, f"the scale of {name} is no number", field="lora")
        try:
            scales[name] = _rounded(scale)
        except ValueError as error:
            raise Refusal(Code.E_PROTO_003, f"the scale of {name} {error}", field="lora") from None
    return _wanted(scales, known)


def _wanted(scales: Mapping[str, float], known: Sequence[Adapter]) -> tuple[Adapter, ...]:
    return tuple(evolve(each, scale=scales[each.name]) for each in known if scales.get(each.name))


def _rounded(scale: float) -> float:
    if not abs(scale) <= MOST_SCALE:
        raise ValueError(f"must be {-MOST_SCALE:g} to {MOST_SCALE:g}")
    return round(float(scale), 2)


def _unknown(name: str, declared: Mapping[str, float]) -> str:
    return f"no adapter is called {name[:64]}{nearest(name, list(declared))}; {_told(declared)}"


def _told(declared: Mapping[str, float]) -> str:
    return f"there are {', '.join(declared)}" if declared else "the model has none"
