"""Grammar rules for arguments that are literals of a language: the inverse of `notation`.

They enforce names, types, words and required members, but no bounds, lengths, patterns or references.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from uma_trio.text.replies.format import CallSyntax
from uma_trio.text.slices import json_text

_DEPTH: Final = 8
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/"
_INTEGER: Final = "/-?(0|[1-9][0-9]{0,17})/"
_PYTHON_TEXT: Final = r'/"([^"\\\n]|\\.)*"/' + r" | /'([^'\\\n]|\\.)*'/"


class LiteralRules:
    """Writes the rules of one syntax. `marker` writes a marker of the format."""

    def __init__(self, syntax: CallSyntax, marker: Callable[[str], str]) -> None:
        self._python = len(syntax.quote) == 1
        self._quote = syntax.quote
        self._behind_key = syntax.key_close
        self._marker = marker
        self._comma = '", "' if self._python else '","'
        self._words = ("True", "False", "None") if self._python else ("true", "false", "null")

    def common(self) -> list[str]:
        quote = self._marker(self._quote)
        if self._python:
            text = [f"lit_text: {_PYTHON_TEXT}"]
        elif quote.startswith("<["):
            text = [f"lit_text: {quote} TEXT {quote}"]
        else:
            text = [f"lit_rest[lazy]: TEXT {quote}", f"lit_text: {quote} lit_rest"]
        key = "lit_text" if self._python else "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
        colon = '": "' if self._python else '":"'
        words = " | ".join(map(_literal, self._words))
        return [
            *text,
            f"lit_any: lit_text | {_NUMBER} | {words} | lit_list | lit_object",
            f'lit_list: "[" (lit_any ({self._comma} lit_any)*)? "]"',
            f"lit_pair: {key} {colon} lit_any",
            f'lit_object: "{{" (lit_pair ({self._comma} lit_pair)*)? "}}"',
            f"lit_argument: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {_literal(self._behind_key)} lit_any",
        ]

    def arguments(self, name: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return what is between the brackets of a call, and the rules for it."""
        rules: list[str] = []
        if not _properties(schema) and schema.get("additionalProperties") is not False:
            return f"(lit_argument ({self._comma} lit_argument)*)?", rules

        def key(word: str) -> str:
            return _literal(word + self._behind_key)

        return self._members(name, schema, key, rules, 0), rules

    def _members(
        self,
        name: str,
        schema: Mapping[str, Any],
        key: Callable[[str], str],
        rules: list[str],
        depth: int,
    ) -> str:
        """Write members in the order of the schema, with commas only between them.

        Of what may follow there are two versions: behind a member, and where none has come.
        """
        required = schema.get("required", ())
        behind, first = '""', '""'
        for number, (word, part) in reversed(list(enumerate(_properties(schema).items()))):
            member, rest = f"{name}_{number}", f"{name}_{number}_rest"
            rules.append(f"{member}: {key(word)} {self._value(member, part, rules, depth)}")
            rules.append(f"{rest}: {behind}")
            first = f"{member} {rest}" if word in required else f"({member} {rest} | {first})"
            more = f"{self._comma} {member} {rest}"
            behind = more if word in required else f"({more} | {rest})"
        return first

    def _value(self, name: str, schema: Any, rules: list[str], depth: int) -> str:
        schema = schema if isinstance(schema, dict) else {}
        words = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(words, list) and words and not any(isinstance(w, dict | list) for w in words):
            return f"({' | '.join(map(self._word, words))})"
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kinds = [
                self._value(f"{name}_{n}", {**schema, "type": each}, rules, depth)
                for n, each in enumerate(kind)
            ]
            return f"({' | '.join(kinds)})"
        simple = {
            "string": "lit_text",
            "integer": _INTEGER,
            "number": _NUMBER,
            "boolean": f"({_literal(self._words[0])} | {_literal(self._words[1])})",
            "null": _literal(self._words[2]),
        }
        if kind in simple:
            return simple[kind]
        if kind == "array" and depth < _DEPTH:
            item = self._value(f"{name}_item", schema.get("items"), rules, depth + 1)
            return f'"[" ({item} ({self._comma} {item})*)? "]"'
        if kind == "object" and _properties(schema) and depth < _DEPTH:
            members = self._members(f"{name}_of", schema, self._inner_key, rules, depth + 1)
            return f'"{{" {members} "}}"'
        return {"array": "lit_list", "object": "lit_object"}.get(str(kind), "lit_any")

    def _inner_key(self, word: str) -> str:
        return _literal(f"{word!r}: " if self._python else f"{word}:")

    def _word(self, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return _literal(self._words[(True, False, None).index(value)])
        if isinstance(value, str):
            if self._python:
                return f"({_literal(repr(value))} | {_literal(json_text(value))})"
            quote = self._marker(self._quote)
            return " ".join(part for part in (quote, _literal(value), quote) if part)
        return _literal(json.dumps(value))


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _literal(text: str) -> str:
    return json_text(text) if text else ""
