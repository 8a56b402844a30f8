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
from uma_trio.text.replies.channels import attribute
from uma_trio.text.replies.format import CallSyntax
from uma_trio.text.replies.literal_rules import LiteralRules
from uma_trio.text.replies.literals import kinds_of
from uma_trio.text.replies.notation import CLOSING
from uma_trio.text.replies.part import part_of
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
MAX_CALLS: Final = (
    64  # in one reply: a model that does not stop by itself would call until max_tokens
)

Special = Callable[[str], int | None]
"""Returns the id of a marker that is one special token, which has no text; None for others."""


@frozen
class Offer:
    """A tool as a grammar needs it; its arguments are held to `schema`."""

    name: str
    schema: Mapping[str, Any]


def grammar_of(
    syntax: CallSyntax,
    offers: Sequence[Offer],
    choice: ToolChoice,
    special: Special,
    answer: str = _ANY_TEXT,
) -> str:
    """Return the grammar of a reply that may, or must, call one of `offers`.

    `answer` is the grammar of a reply without calls; only any text may also precede calls.
    """
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
    # The same white space may stand before the end, or whoever wrote it would have to call again.
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
            rules.append(f"lead[lazy]: TEXT {_quoted(trigger)}")
        rules.append(f"start: TEXT | lead {tail} rest")
    return _HEAD + _TEXT + "\n".join(rules) + "\n"


def answer_of(shape: Shape, style: Mapping[str, Any]) -> str | None:
    """Return the grammar of an answer of a shape, JSON in a `style`, as a part of another grammar.

    None for regular expressions and grammars, which cannot be part of another one.
    """
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
    """Writes rules of one syntax."""

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
            head = f"{{{_quoted(syntax.name_key)}: {_quoted(offer.name)}, {_quoted(syntax.arguments_key)}: "
            tail = _literal("}")
            if syntax.id_key:
                tail = f"{_literal(f', {_quoted(syntax.id_key)}: {chr(34)}')} {_ID} {_literal(chr(34) + '}')}"
            return f"{name}: {_literal(head)} {arguments} {tail}"
        if syntax.style == "harmony":
            return self._harmony_call(name, offer.name, arguments)
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
        root = {"$defs": arguments.pop("$defs", {}), "x-guidance": arguments.pop("x-guidance", {})}
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
        properties = offer.schema.get("properties")
        required = offer.schema.get("required", ())
        parts: list[str] = []
        rules: list[str] = []
        for number, (key, schema) in enumerate(
            properties.items() if isinstance(properties, dict) else ()
        ):
            rule = f"{name}_{number}"
            is_text = isinstance(schema, dict) and schema.get("type") == "string"
            key_close = syntax.key_close if is_text else syntax.key_close_json or syntax.key_close
            opened = self.marker(syntax.key_open + key + key_close)
            rules.append(f"{rule}: {opened} {self._value(rule, key, schema, offer.schema, rules)}")
            parts.append(rule if key in required else f"{rule}?")
        head = self.marker(offer.name + syntax.after_name)
        return "\n".join([f"{name}: {head} {' '.join(parts)}", *rules])

    def _value(
        self, rule: str, key: str, schema: Any, whole: Mapping[str, Any], rules: list[str]
    ) -> str:
        """Write a value up to its closing tag: a text as it is, anything else as JSON."""
        closer = self._syntax.value_close.replace("{}", key)
        schema = schema if isinstance(schema, dict) else {}
        if schema.get("type") != "string":
            alone = {**part_of(whole, schema), "x-guidance": whole.get("x-guidance", {})}
            return f"%json {json_text(alone)} {self.marker(closer)}"
        words = schema.get("enum")
        if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
            return f"({' | '.join(map(_literal, words))}) {self.marker(closer)}"
        if self._special(atoms(closer)[0]) is not None:
            return f"TEXT {self.marker(closer)}"
        rules.append(f"{rule}_text[lazy]: TEXT {_literal(closer)}")
        return f"{rule}_text"

    def _harmony_call(self, name: str, called: str, arguments: str) -> str:
        head = self.marker(
            f"<|channel|>commentary to=functions.{called} <|constrain|>json<|message|>"
        )
        return f"{name}: {head} {arguments}"

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
        schema = offer.schema
        properties = schema.get("properties")
        rules: list[str] = []
        parts: list[str] = []
        for number, (key, part) in enumerate(
            properties.items() if isinstance(properties, dict) else ()
        ):
            rule, closer = f"{name}_{number}", self.marker(_ARGUED)
            kinds = sorted(kinds_of(part)) or ["string"]
            forms: list[str] = []
            for kind in kinds:
                tag = self.marker(
                    f'<|open|>argument key="{attribute(key)}" type="{_TYPES.get(kind, kind)}"<|sep|>'
                )
                forms.append(f"{tag} {self._argument(part, kind, schema)} {closer}")
            rules.append(f"{rule}: {' | '.join(forms)}")
            parts.append(rule if key in schema.get("required", ()) else f"{rule}?")
        head = self.marker(f'<|open|>call tool="{attribute(offer.name)}" index="')
        close = self.marker("<|close|>call<|sep|>")
        body = f"{name}: {head} /[1-9][0-9]?/ {self.marker(chr(34) + '<|sep|>')} {' '.join(parts)} {close}"
        return "\n".join([body, *rules])

    def _argument(self, part: Any, kind: str, whole: Mapping[str, Any]) -> str:
        schema = part if isinstance(part, dict) else {}
        words = schema.get("enum")
        if kind == "string":
            if isinstance(words, list) and words:
                return f"({' | '.join(_literal(w) for w in words if isinstance(w, str) and w)})"
            return "TEXT"
        alone = {
            **part_of(whole, {**schema, "type": kind}),
            "x-guidance": whole.get("x-guidance", {}),
        }
        return f"%json {json_text(alone)}"

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

    def _channels(self, said: str, rules: list[str]) -> str:
        """Write the grammar of a reply whose response may be open already."""
        end = f"({self.marker('<|close|>message<|sep|>')})?"
        start = f"start: ({self.marker('<|open|>response<|sep|>')})? {said} {end}"
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
        said = f"{self.marker(syntax.text_header)} {answer}"
        return self._frames("called" if choice.mode == "required" else f"(called | {said})", rules)

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


def _literal(text: str) -> str:
    return _quoted(text) if text else ""


def _quoted(text: str) -> str:
    return json_text(text)
