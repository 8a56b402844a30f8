"""What the request classes declare, as rules for values: the source of checks, tables and options.

`fields_of(Generate)` reads the types and `Meta` of a msgspec Struct. Of `Meta.extra` it reads: `printable` (no control
characters), `plural` (what the items of a list are called), `max_bytes` (of an object as JSON), `rule` (a rule in place of
that of the type), `aliases` (other names in HTTP), `read` (what HTTP converts a value by), `model_default` (a model's configuration may set it).
"""

from __future__ import annotations

import functools
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from .requests import BY_TYPE, CHAT_ONLY, EXACTLY_ONE, SHAPES, GenerateOptions
from .rules import (
    ByToken,
    Field,
    FieldFault,
    Flag,
    Integer,
    ListOf,
    Number,
    Object,
    OneOf,
    Record,
    Rule,
    Text,
    check,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the fields of a request class, in the order in which they are sent."""
    return tuple(_field(field) for field in msgspec.structs.fields(struct))


def model_defaults() -> Mapping[str, Rule]:
    """Return the sampling options that a model's configuration may set, by name."""
    return _model_defaults()


@functools.cache
def _model_defaults() -> Mapping[str, Rule]:
    fields = fields_of(GenerateOptions)
    return MappingProxyType({one.name: one.rule for one in fields if one.model_default})


def check_request(kind: str, document: dict[str, Any]) -> FieldFault | None:
    """Return the first fault of a request of a known type, without its `type` field."""
    fault = check(fields_of(BY_TYPE[kind]), document)
    if fault is None and kind in EXACTLY_ONE:
        one, other = EXACTLY_ONE[kind]
        if (one in document) is (other in document):
            both = "both are given" if one in document else "neither is given"
            return FieldFault(one, f"or {other} must be given, exactly one of them, but {both}")
    return fault or (_contradiction(document) if kind == "generate" else None)


def _contradiction(document: dict[str, Any]) -> FieldFault | None:
    """Return the first field of a `generate` request that contradicts another field."""
    for name in CHAT_ONLY:
        if document.get(name) and "prompt" in document:
            return FieldFault(name, "applies to messages, but the request has a prompt: omit it")
    shapes = [name for name in SHAPES if name in document]
    if len(shapes) > 1:
        return FieldFault(shapes[1], f"cannot be combined with {shapes[0]}: give one of them")
    if "logprobs" in document and document.get("stream") is False:
        return FieldFault("logprobs", "is sent with each token, but stream is false: omit stream")
    return None


def is_id(value: Any) -> bool:
    """Whether a value could be a request's id."""
    return fields_of(BY_TYPE["embed"])[0].rule.check("id", value) is None


# --- from types to rules ---


def _field(field: msgspec.structs.FieldInfo) -> Field:
    kind, meta = _without_meta(field.type)
    extra = meta.extra or {}
    return Field(
        name=field.encode_name,
        rule=extra.get("rule") or _rule(kind, meta),
        note=meta.description or "",
        required=field.required,
        aliases=tuple(extra.get("aliases", ())),
        model_default=bool(extra.get("model_default")),
        read=extra.get("read"),
    )


def _without_meta(annotation: Any) -> tuple[Any, msgspec.Meta]:
    """Return a type without None, and its metadata."""
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *metas = get_args(annotation)
        return kind, next(meta for meta in metas if isinstance(meta, msgspec.Meta))
    if origin in (Union, UnionType):
        (kind,) = (each for each in get_args(annotation) if each is not type(None))
        return _without_meta(kind)
    return annotation, msgspec.Meta()


def _rule(kind: Any, meta: msgspec.Meta) -> Rule:
    extra: Mapping[str, Any] = meta.extra or {}
    origin, args = get_origin(kind), get_args(kind)
    if kind is bool:
        return Flag()
    if kind is float:
        return Number(meta.ge or 0, meta.le or 0)
    if kind is int:
        return Integer(int(meta.ge or 0), int(meta.le or 0))
    if kind is str:
        printable = bool(extra.get("printable"))
        return Text(meta.min_length or 0, meta.max_length, printable=printable)
    if origin is Literal:
        return OneOf(args)
    if origin is tuple:
        item = _rule(*_without_meta(args[0]))
        plural = extra.get("plural") or item.text.replace("a string", "strings")
        return ListOf(meta.min_length or 0, meta.max_length or 0, item, plural)
    if origin is dict and args[0] is int:
        return ByToken(meta.max_length or 0, _rule(*_without_meta(args[1])))
    if origin is dict:
        return Object(extra["max_bytes"])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return Record(*fields_of(kind))
    raise TypeError(f"no rule for {kind}")
