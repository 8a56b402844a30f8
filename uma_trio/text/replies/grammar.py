"""Grammars of replies in llguidance's Lark, from the record that drives the parser.

They force what the model's template writes. Markers that are special tokens are tokens in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from uma_trio.text.chat import ToolChoice
from uma_trio.text.replies.bodies import atoms
from uma_trio.text.replies.format import CallSyntax
from uma_trio.text.replies.framed import attribute
from uma_trio.text.replies.literals import CLOSING, kinds_of
from uma_trio.text.schemas import part_of
from uma_trio.text.shape import Shape
from uma_trio.text.slices import json_text

_ATOM: Final = re.compile(r"\]<\]\w+\[>\[|<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|[^\s<\[]+|.", re.DOTALL)
_HEAD: Final = '%llguidance {"allow_initial_skip": false}\n'
_ANY_TEXT: Final = "TEXT"
_TEXT: Final = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{1,2}/\n"
_FINAL: Final = "<|channel|>final<|message|>"
_RESPONDED: Final = "<|close|>response<|sep|>"
_ARGUED: Final = "<|close|>argument<|sep|>"
_TYPES: Final = {"integer": "number"}  # what an argument's tag in a channel calls a schema's type
_ID: Final = "/[A-Za-z0-9]{9}/"
#: In one reply: a model that does not stop by itself would call until max_tokens.
MAX_CALLS: Final = 64

Special = Callable[[str], int | None]
"""Returns the id of a marker that is one special token, which has no text; None for others."""


@frozen
class Offer:
    name: str
    schema: Mapping[str, Any]


def grammar_of(
    syntax: CallSyntax,
    offers: Sequence[Offer],
    choice: ToolChoice,
    special: Special,
    answer: str = _ANY_TEXT,
) -> str:
    """Return the grammar of a reply that may, or must, call one of `offers`; otherwise it is an `answer`."""
    writer = _Writer(syntax, special, beside_json=answer != _ANY_TEXT)
    bodies = " | ".join(f"body_{index}" for index in range(len(offers)))
    rules = [writer.body(index, offer) for index, offer in enumerate(offers)]
    if syntax.style == "literal":
        rules += writer.literals.common()
    if syntax.style == "harmony":
        return writer.harmony(bodies, rules, choice, answer)
    if syntax.style == "channels":
        return writer.channels(rules, bodies, choice, answer)
    if syntax.message_open:
        return writer.frames(rules, offers, choice, answer)
    opened, close = writer.marker(syntax.open), writer.marker(syntax.close)
    # Models are not sure about white space between calls, and it means nothing.
    between = writer.marker(syntax.between) if syntax.between.strip() else "SPACE?"
    again = f"({between} {opened} body {close}){{0,{MAX_CALLS - 1}}}" if choice.parallel else ""
    # The same white space is allowed before the end; otherwise a model that wrote it would have to call again.
    end = f"SPACE? {writer.marker(syntax.section_close)}"
    rules += [f"body: {bodies}", f"rest: body {close} {again} {end}"]
    start = syntax.start
    if choice.mode == "required":
        rules.append(f"start: {writer.marker(start)} rest")
    elif answer != _ANY_TEXT:
        rules.append(f"start: {answer} | {writer.marker(start)} rest")
    elif syntax.bare:
        rules.append(f"start: TEXT | {writer.marker(start)} rest")
    elif not start.strip():
        rules.append("start: TEXT | rest")
    else:
        trigger = next(iter(atoms(start)))
        tail = writer.marker(start[len(trigger) :])
        token = special(trigger)
        if token is not None:
            rules.append(f"lead: TEXT <[{token}]>")
        else:
            rules.append(f"lead[lazy]: TEXT {json_text(trigger)}")
        rules.append(f"start: TEXT | lead {tail} rest")
    return _HEAD + _TEXT + "\n".join(rules) + "\n"


def answer_of(shape: Shape, style: Mapping[str, Any]) -> str | None:
    """Return the grammar of an answer as a part of another; None if its kind cannot be one."""
    if shape.kind == "schema":
        schema = {**json.loads(shape.text), "x-guidance": style}
        return f"%json {json_text(schema)}"
    if shape.kind == "choice":
        return f"({' | '.join(map(_literal, json.loads(shape.text)))})"
    return None


def answer_in_frame(syntax: CallSyntax, answer: str, special: Special) -> str:
    """Return the grammar of a framed reply whose final message is an `answer`."""
    return _Writer(syntax, special).final(answer)


class _Writer:
    def __init__(self, syntax: CallSyntax, special: Special, *, beside_json: bool = False) -> None:
        self._syntax, self._special, self._beside_json = syntax, special, beside_json
        self.literals = LiteralRules(syntax, self.marker)

    def marker(self, text: str) -> str:
        """Write special tokens as tokens, the rest as text."""
        parts: list[str] = []
        literal = ""
        for atom in _ATOM.findall(text):
            token = self._special(atom)
            if token is None:
                literal += atom
                continue
            parts += [_literal(literal), f"<[{token}]>"]
            literal = ""
        return " ".join(part for part in [*parts, _literal(literal)] if part)

    def body(self, index: int, offer: Offer) -> str:
        syntax, name = self._syntax, f"body_{index}"
        if syntax.style == "tagged":
            return self._tagged(name, offer)
        if syntax.style == "literal":
            inner, rules = self.literals.arguments(name, offer.schema)
            head = self.marker(offer.name + syntax.after_name)
            close = _literal(CLOSING[syntax.after_name.strip()[-1]])
            return "\n".join([f"{name}: {head} {inner} {close}", *rules])
        arguments = f"%json {json_text(offer.schema)}"
        if syntax.style == "object" and syntax.bare and self._beside_json:
            return f"{name}: %json {json_text(self._whole_object(offer))}"
        if syntax.style == "object":
            head = f"{{{json_text(syntax.name_key)}: {json_text(offer.name)}, {json_text(syntax.arguments_key)}: "
            tail = _literal("}")
            if syntax.id_key:
                tail = f"{_literal(f', {json_text(syntax.id_key)}: {chr(34)}')} {_ID} {_literal(chr(34) + '}')}"
            return f"{name}: {_literal(head)} {arguments} {tail}"
        if syntax.style == "harmony":
            head = f"commentary to=functions.{offer.name} <|constrain|>json"
            return f"{name}: {self.marker(f'<|channel|>{head}<|message|>')} {arguments}"
        if syntax.style == "channels":
            return self._channel_call(name, offer)
        called = _literal(offer.name)
        if syntax.name_in_id:
            called = f"{_literal(f'functions.{offer.name}:')} /[0-9]{{1,4}}/"
        if syntax.id_close:
            called = f"{_ID} {self.marker(syntax.id_close)} {called}"
        if syntax.id_open:
            called += f" {self.marker(syntax.id_open)} {_ID}"
        return f"{name}: {called} {self.marker(syntax.after_name)} {arguments}"

    def _whole_object(self, offer: Offer) -> dict[str, Any]:
        """Return the schema of a whole call: where an object may stand as well, texts and JSON share no lexemes."""
        syntax = self._syntax
        arguments = part_of(offer.schema, offer.schema)
        root = {key: arguments.pop(key, {}) for key in ("$defs", "x-guidance")}
        members = {syntax.name_key: {"const": offer.name}, syntax.arguments_key: arguments}
        if syntax.id_key:
            members[syntax.id_key] = {"type": "string", "pattern": f"^{_ID.strip('/')}$"}
        return {
            "type": "object",
            "properties": members,
            "required": list(members),
            "additionalProperties": False,
            **root,
        }

    def _tagged(self, name: str, offer: Offer) -> str:
        syntax = self._syntax

        def argument(rule: str, key: str, schema: Any, rules: list[str]) -> str:
            is_text = isinstance(schema, dict) and schema.get("type") == "string"
            key_close = syntax.key_close if is_text else syntax.key_close_json or syntax.key_close
            opened = self.marker(syntax.key_open + key + key_close)
            return f"{opened} {self._value(rule, key, schema, offer.schema, rules)}"

        arguments, rules = _arguments(name, offer.schema, argument)
        head = self.marker(offer.name + syntax.after_name)
        return "\n".join([f"{name}: {head} {arguments}", *rules])

    def _value(
        self, rule: str, key: str, schema: Any, whole: Mapping[str, Any], rules: list[str]
    ) -> str:
        """Write a value up to its closing tag: a text as it is, anything else as JSON."""
        closer = self._syntax.value_close.replace("{}", key)
        schema = schema if isinstance(schema, dict) else {}
        if schema.get("type") != "string":
            return f"{_json(schema, whole)} {self.marker(closer)}"
        words = schema.get("enum")
        if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
            return f"({' | '.join(map(_literal, words))}) {self.marker(closer)}"
        if self._special(atoms(closer)[0]) is not None:
            return f"TEXT {self.marker(closer)}"
        rules.append(f"{rule}_text[lazy]: TEXT {_literal(closer)}")
        return f"{rule}_text"

    def harmony(self, bodies: str, rules: list[str], choice: ToolChoice, answer: str) -> str:
        if choice.mode == "required":
            return self._behind_thought(f"({bodies})", rules)
        return self._behind_thought(f"({bodies} | {self.marker(_FINAL)} {answer})", rules)

    def final(self, answer: str) -> str:
        if self._syntax.style == "channels":
            return self._channels(f"{answer} {self.marker(_RESPONDED)}", [])
        if self._syntax.message_open:
            return self._frames(f"{self.marker(self._syntax.text_header)} {answer}", [])
        return self._behind_thought(f"{self.marker(_FINAL)} {answer}", [])

    def _channel_call(self, name: str, offer: Offer) -> str:
        def argument(_rule: str, key: str, schema: Any, _rules: list[str]) -> str:
            start, forms = f'<|open|>argument key="{attribute(key)}" type="', list[str]()
            for kind in sorted(kinds_of(schema)) or ["string"]:
                tag = self.marker(f'{start}{_TYPES.get(kind, kind)}"<|sep|>')
                value = _typed(schema, kind, offer.schema)
                forms.append(f"{tag} {value} {self.marker(_ARGUED)}")
            return " | ".join(forms)

        arguments, rules = _arguments(name, offer.schema, argument)
        head = self.marker(f'<|open|>call tool="{attribute(offer.name)}" index="')
        end, close = self.marker('"<|sep|>'), self.marker("<|close|>call<|sep|>")
        return "\n".join([f"{name}: {head} /[1-9][0-9]?/ {end} {arguments} {close}", *rules])

    def channels(self, rules: list[str], bodies: str, choice: ToolChoice, answer: str) -> str:
        more = f"(body){{0,{MAX_CALLS - 1}}}" if choice.parallel else ""
        opened, closed = self.marker("<|open|>tools<|sep|>"), self.marker("<|close|>tools<|sep|>")
        called = f"{opened} body {more} {closed}"
        tools = called if choice.mode == "required" else f"({called})?"
        rules = [*rules, f"body: {bodies}", f"tools: {tools}"]
        responded = self.marker(_RESPONDED)
        if choice.mode == "required" or answer == _ANY_TEXT:
            return self._channels(f"TEXT {responded} tools", rules)
        return self._channels(f"({answer} {responded} | {responded} {called})", rules)

    def _channels(self, response: str, rules: list[str]) -> str:
        """Write the grammar of a reply whose response may be open already."""
        end = f"({self.marker('<|close|>message<|sep|>')})?"
        start = f"start: ({self.marker('<|open|>response<|sep|>')})? {response} {end}"
        return _HEAD + _TEXT + "\n".join([*rules, start]) + "\n"

    def frames(
        self, rules: list[str], offers: Sequence[Offer], choice: ToolChoice, answer: str
    ) -> str:
        syntax = self._syntax
        opened, closed = self.marker(syntax.open), self.marker(syntax.close)
        has_name = "{}" in syntax.call_header
        calls = [
            f"{self.marker(syntax.call_header.format(offer.name)) if has_name else ''} "
            f"{opened} body_{index} {closed}"
            for index, offer in enumerate(offers)
        ]
        between = self.marker(syntax.between) or "SPACE?"
        again = f"({between} call){{0,{MAX_CALLS - 1}}}" if choice.parallel else ""
        head = "" if has_name else self.marker(syntax.call_header)
        called = f"{head} call {again} {self.marker(syntax.section_close)}"
        rules = [*rules, f"call: {' | '.join(calls)}", f"called: {called}"]
        response = f"{self.marker(syntax.text_header)} {answer}"
        return self._frames(
            "called" if choice.mode == "required" else f"(called | {response})", rules
        )

    def _frames(self, last: str, rules: list[str]) -> str:
        """Write the grammar of a last message, whose beginning the prompt or the reasoning may have left open."""
        syntax = self._syntax
        ends = list(map(self.marker, syntax.message_ends.split()))
        opened, thought = self.marker(syntax.message_open), self.marker(syntax.thought_header)
        thoughts = f"({thought} TEXT {ends[0]} {opened})?" if thought else ""
        start = f"start: ({opened})? {thoughts} {last} ({' | '.join(ends)})?"
        return _HEAD + _TEXT + "\n".join([*rules, start]) + "\n"

    def _behind_thought(self, last: str, rules: list[str]) -> str:
        opened = self.marker("<|channel|>analysis<|message|>")
        closed = self.marker("<|end|><|start|>assistant")
        start = f"start: ({opened} TEXT {closed})? {last}"
        return _HEAD + _TEXT + "\n".join([*rules, start]) + "\n"


def _arguments(
    name: str, schema: Mapping[str, Any], write: Callable[[str, str, Any, list[str]], str]
) -> tuple[str, list[str]]:
    """Return the arguments of a schema in turn, and a rule for each, which `write` writes."""
    parts: list[str] = []
    rules: list[str] = []
    for number, (key, part) in enumerate(_properties(schema).items()):
        rule = f"{name}_{number}"
        rules.append(f"{rule}: {write(rule, key, part, rules)}")
        parts.append(rule if key in schema.get("required", ()) else f"{rule}?")
    return " ".join(parts), rules


def _typed(part: Any, kind: str, whole: Mapping[str, Any]) -> str:
    """Write a value of one type: a text as it is, anything else as JSON."""
    schema = part if isinstance(part, dict) else {}
    if kind != "string":
        return _json({**schema, "type": kind}, whole)
    words = schema.get("enum")
    if isinstance(words, list) and words:
        return f"({' | '.join(_literal(w) for w in words if isinstance(w, str) and w)})"
    return "TEXT"


def _json(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    alone = {**part_of(whole, schema), "x-guidance": whole.get("x-guidance", {})}
    return f"%json {json_text(alone)}"


def _literal(text: str) -> str:
    return json_text(text) if text else ""


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
        """Write members in the schema's order, with a rule for what follows a member, and one without."""
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
