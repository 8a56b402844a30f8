"""Draw the parts of docs/reference/protocol.md that are declared in code: states, codes and fields.

python docs/draw_states.py            write them between their markers
python docs/draw_states.py --check    exit 1 if that would change anything
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from typing import TYPE_CHECKING

from uma_protocol import CODES, Role
from uma_protocol.requests import BY_TYPE, MAX_ID_BYTES, MAX_LABEL_BYTES
from uma_protocol.schema import fields_of
from uma_protocol.states import INITIAL, TABLES, State

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENT = pathlib.Path(__file__).parent / "reference" / "protocol.md"
_BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def states(role: Role) -> str:
    """The table of a role as a mermaid diagram; inputs that lead the same way share an arrow."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, happened), target in TABLES[role].items():
        arrows.setdefault((state, target), []).append(happened.value)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {INITIAL[role].name}"]
    lines += [
        f"    {state.name} --> {target.name}: {', '.join(labels)}"
        for (state, target), labels in arrows.items()
    ]
    return "\n".join([*lines, "    ERROR --> [*]: close", "```"])


def codes() -> str:
    """The table of codes."""
    rows = [
        f"| `{code}` | {info.title} | {info.fatality.value} | {'yes' if info.retryable else 'no'} "
        f"| {info.action} |"
        for code, info in CODES.items()
    ]
    head = ["| code | meaning | fatal | retryable | what to do |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def fields() -> str:
    """One table of the fields of all requests; a field that several have in common has one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for kind, request in BY_TYPE.items():
        for field in fields_of(request):
            row = (field.name, brief(field.rule.text), field.note)
            rows.setdefault(row, []).append(kind + "*" * field.required)
    return "\n".join(
        [
            "| field | requests (`*`: required) | must be | meaning |",
            "|---|---|---|---|",
            *(
                f"| `{name}` | {', '.join(requests)} | {rule} | {note} |"
                for (name, rule, note), requests in rows.items()
            ),
        ]
    )


def brief(rule: str) -> str:
    """A rule in fewer words than an error message has."""
    for long, short in (
        (f"a string of 1 to {MAX_LABEL_BYTES} bytes without control characters", "a label"),
        (f"a string of 1 to {MAX_ID_BYTES} bytes without control characters", "an id"),
        ("2147483647", "2^31-1"),
        ("9223372036854775807", "2^63-1"),
        (" from ", " "),
        ("an integer", "integer"),
        ("a number", "number"),
        ("true or false", "flag"),
    ):
        rule = rule.replace(long, short)
    return rule


BLOCKS: dict[str, Callable[[], str]] = {
    "states-server": lambda: states(Role.SERVER),
    "states-client": lambda: states(Role.CLIENT),
    "codes": codes,
    "fields": fields,
}


def render(text: str) -> str:
    """The document with every block drawn anew.

    Raises:
        SystemExit: a block is missing, or a marker names none.
    """
    marked = [name for _, name, _ in _BLOCK.findall(text)]
    if sorted(marked) != sorted(BLOCKS):
        raise SystemExit(f"{DOCUMENT.name} must mark {sorted(BLOCKS)} once each, not {marked}")
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


def main() -> int:
    """Write or check the document."""
    parser = argparse.ArgumentParser(
        description="Draw the generated parts of the protocol reference."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    options = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    drawn = render(text)
    if drawn == text:
        return 0
    if options.check:
        print(f"{DOCUMENT.name} is stale: run python docs/{pathlib.Path(__file__).name}")
        return 1
    DOCUMENT.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
