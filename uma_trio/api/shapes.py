"""What an answer has to look like, in the three spellings that clients use for it.

OpenAI's is `response_format`, llama-server's `json_schema` and `grammar`, vLLM's
`structured_outputs` and, before that, `guided_json` and its sisters. Each comes down to one
:class:`Shape`; what cannot be kept to is refused where it is compiled, and nothing is loosened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from uma_trio.api.bodies import CHOICES, BodySpec, TextBody
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.pieces import Excessive, JsonLimits, NotJson, decoded
from uma_trio.service.ask import Shape
from uma_trio.service.checks import json_text
from uma_trio.text.schemas import without_annotations
from uma_trio.text.slices import utf8

_ANY_OBJECT: Final = '{"type": "object"}'

_ELSEWHERE: Final = (
    *("response_format", "json_schema", "grammar", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("format", "text", "output_config", "output_format"),  # Ollama, Responses, Messages
    *(
        "regex",
        "ebnf",
        "structural_tag",
        "choice",
        "schema",
        "guided_decoding",
    ),  # SGLang, vLLM, the socket
    *("regex_pattern", "grammar_string"),  # TabbyAPI
)
_NESTED: Final = ("options", "parameters", "extra_body", "nvext")


def refuse_other_shapes(spec: BodySpec[Any], document: Mapping[str, Any]) -> None:
    """Refuse what asks for a shape under the name that another API has for it.

    Ignored, it would give a client an answer that its parser cannot read.

    Raises:
        Fault: such a field is there, and `spec` has another name for it.
    """
    own = spec.by_name.keys()
    for name in _ELSEWHERE:
        if name not in own and _asks_for_shape(name, document.get(name)):
            raise _other_shape(name, own)
    for outer in _NESTED:
        inside = document.get(outer)
        if isinstance(inside, dict):
            for name in _ELSEWHERE:
                if _asks_for_shape(name, inside.get(name)):
                    raise _other_shape(f"{outer}.{name}", own)


def _asks_for_shape(name: str, value: Any) -> bool:
    if name in ("text", "output_config"):
        value = value.get("format") if isinstance(value, dict) else None
    if isinstance(value, dict) and value.get("type") == "text":
        return False
    return value not in (None, False, "", "text", [], {})


def _other_shape(name: str, own: Collection[str]) -> Fault:
    named = ", ".join(_SPELLED.get(known, known) for known in _ELSEWHERE if known in own)
    return invalid(
        name,
        f"is another API's name for the shape of an answer; here it is asked for by {named}",
        code="unsupported_parameter",
    )


_SPELLED: Final = {"text": "text.format", "output_config": "output_config.format"}


def shape_of(body: TextBody) -> Shape | None:
    """Return what the answer has to look like; None if nothing says.

    Raises:
        Fault: it is said in a wrong way, or in two.
    """
    found = [
        shape
        for field, read in _READERS.items()
        if (value := getattr(body, field, None)) is not None
        and (shape := read(field, value)) is not None
    ]
    if len(found) > 1:
        raise invalid(found[1].field, f"cannot be combined with {found[0].field}")
    return found[0] if found else None


def format_of(field: str, value: Any) -> Shape | None:
    """Return what the `format` of Responses and Messages asks for: its schema stands in it.

    Raises:
        Fault: it is no format, or has no schema.
    """
    kind = _kind(field, value)
    if kind != "json_schema":
        return None if kind == "text" else Shape("schema", _ANY_OBJECT, field)
    if not isinstance(value.get("schema"), dict):
        raise invalid(field, 'must have a schema, as in {"type": "json_schema", "schema": {...}}')
    return _of_schema(field, value["schema"], strict=value.get("strict") is True)


def word_or_schema(field: str, value: Any) -> Shape | None:
    """Return what the `format` of Ollama asks for: the word `json`, or a schema.

    Raises:
        Fault: it is neither.
    """
    if value == "json":
        return Shape("schema", _ANY_OBJECT, field)
    if isinstance(value, str) and value:
        raise invalid(field, "must be json or a JSON Schema, which is an object")
    return _schema(field, value)


def _kind(field: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid(field, "must be an object of type text, json_object or json_schema")
    return str(kind)


def _response_format(field: str, value: Any) -> Shape | None:
    kind = _kind(field, value)
    if kind == "text":
        return None
    if kind == "json_object":  # llama-server takes a schema here, too
        return _schema(field, value.get("schema")) or Shape("schema", _ANY_OBJECT, field)
    inner = value.get(
        "json_schema", value
    )  # llama-server's documents have the schema in place of it
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise invalid(field, 'must have a json_schema such as {"name": "x", "schema": {...}}')
    return _of_schema(field, inner["schema"], strict=inner.get("strict") is True)


def _structured(field: str, value: Any) -> Shape | None:
    if not isinstance(value, dict):
        raise invalid(field, "must be an object")
    given = {name: part for name, part in value.items() if part not in (None, False)}
    if not given:
        return None
    if len(given) > 1:
        raise invalid(field, f"must say one thing: {', '.join(_PARTS)}")
    ((name, part),) = given.items()
    if name not in _PARTS:
        raise invalid(field, f"must be one of {', '.join(_PARTS)}")
    return _PARTS[name](field, part)


def _schema(field: str, value: Any) -> Shape | None:
    """Read a schema, or one that is written as a string; an empty one says nothing."""
    if isinstance(value, str):
        return _written_schema(field, value) if value.strip() else None
    if value is not None and not isinstance(value, dict):
        raise invalid(field, "must be a JSON Schema, which is an object")
    return _of_schema(field, value) if value else None


def _written_schema(field: str, text: str) -> Shape:
    """Read a schema that is written as a string; what is none is for the compiler to say."""
    try:
        schema = decoded(utf8(text), JsonLimits(text=len(text)))
    except (NotJson, Excessive):
        schema = None
    return _of_schema(field, schema) if isinstance(schema, dict) else Shape("schema", text, field)


def _of_schema(field: str, schema: dict[str, Any], *, strict: bool = False) -> Shape:
    """Return the shape of a schema; one that is not strict without what only annotates, which is named in the answer."""
    text = _json(field, schema)
    if strict or not any(word in text for word in _ANNOTATE):
        return Shape("schema", text, field)
    bare, dropped = without_annotations(schema)
    return Shape("schema", _json(field, bare), field, dropped)


_ANNOTATE: Final = ('"format"', '"uniqueItems"')


def _object(field: str, value: Any) -> Shape | None:
    if value is not True:
        raise invalid(field, "has a json_object that is not true or false")
    return Shape("schema", _ANY_OBJECT, field)


def _regex(field: str, value: Any) -> Shape | None:
    return Shape("regex", _text(field, value), field) if value else None


def _grammar(field: str, value: Any) -> Shape | None:
    return Shape("grammar", _text(field, value), field) if value else None


def _choice(field: str, value: Any) -> Shape | None:
    fault = CHOICES.check(field, value)
    if fault is not None:
        raise invalid(fault.field, fault.problem)
    return Shape("choice", _json(field, value), field)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(field, "must be a string")
    return value


def _json(field: str, value: Any) -> str:
    try:
        return json_text(value)
    except RecursionError:
        raise invalid(field, "is nested too deeply") from None


_Reader = Callable[[str, Any], Shape | None]

_PARTS: Final[Mapping[str, _Reader]] = {
    "json": _schema,
    "json_object": _object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READERS: Final[Mapping[str, _Reader]] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "grammar": _grammar,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
