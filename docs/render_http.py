"""Write the tables of docs/reference/http.md from where endpoints and fields are declared.

python docs/render_http.py            writes them
python docs/render_http.py --check    says whether they are stale, and exits with 1 if so
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draw_states import brief

from uma_trio.api import encoders, status
from uma_trio.api.anthropic.endpoint import Messages
from uma_trio.api.bodies import BodySpec
from uma_trio.api.llama import server as llama_server
from uma_trio.api.llama.completion import Completion
from uma_trio.api.ollama import bodies as ollama
from uma_trio.api.ollama import models as ollama_models
from uma_trio.api.openai import models as openai_models
from uma_trio.api.openai.chat import ChatCompletions
from uma_trio.api.openai.completions import Completions
from uma_trio.api.responses.endpoint import Responses
from uma_trio.api.routes import ROUTES

PAGE = Path(__file__).resolve().parent / "reference" / "http.md"

#: The columns of the matrix: a letter for each endpoint of text, in the order of the page.
TEXT: Mapping[str, Sequence[BodySpec[Any]]] = {
    "C": (ChatCompletions.spec,),
    "T": (Completions.spec,),
    "L": (Completion.spec,),
    "R": (Responses.spec,),
    "M": (Messages.spec,),
    "O": (ollama.CHAT, ollama.GENERATE),
    "o": (ollama.OPTIONS,),
}
OTHERS: Mapping[str, Sequence[BodySpec[Any]]] = {
    "/embeddings": (encoders.EMBEDDINGS,),
    "/embedding": (encoders.EMBEDDING,),
    "/api/embed, /api/embeddings": (encoders.OLLAMA_EMBED,),
    "/rerank": (encoders.RERANK,),
    "/tokenize": (llama_server.TOKENIZE,),
    "/detokenize": (llama_server.DETOKENIZE,),
    "/apply-template": (llama_server.APPLY_TEMPLATE,),
    "/api/show": (ollama_models.SHOW,),
    "/priority": (status.PRIORITY,),
    "/load, /unload": (openai_models.NAMED,),
}
_ACCESS = {"open": "open", "key": "", "own": "own", "operator": "operator"}


def endpoints() -> str:
    """Return the table of paths; those with the same handler share a row."""
    rows: dict[tuple[object, str], list[str]] = {}
    for route in ROUTES:
        path = f"`{route.path}{'NAME' if route.takes_more else ''}`"
        rows.setdefault((route.handler, route.access), []).append(f"{route.method} {path}")
    return _table(
        ("path", "what it does", "access"),
        [
            (", ".join(paths), (handler.__doc__ or "").splitlines()[0], _ACCESS[access])
            for (handler, access), paths in rows.items()
        ],
    )


def matrix(columns: Mapping[str, Sequence[BodySpec[Any]]], separator: str) -> str:
    """Return a row for each field and meaning, with the endpoints that have it."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for column, specs in columns.items():
        for spec in specs:
            for field in spec.fields:
                names = ", ".join(f"`{name}`" for name in (field.name, *field.aliases))
                found = rows.setdefault((names, brief(field.rule.text), field.note), [])
                if column not in found:
                    found.append(column)
    return _table(
        ("field", "endpoints", "takes", "meaning"),
        [(names, separator.join(found), rule, note) for (names, rule, note), found in rows.items()],
    )


def without_effect(columns: Mapping[str, Sequence[BodySpec[Any]]]) -> str:
    """Return the fields that are refused or ignored, with the endpoints that know them."""
    refused = _by_columns(columns, lambda spec: spec.refused)
    ignored = _by_columns(columns, lambda spec: spec.ignored)
    return f"Refused with 400: {refused}.\n\nIgnored, and named in `X-UMA-Ignored`: {ignored}."


def _by_columns(columns: Mapping[str, Sequence[BodySpec[Any]]], names: Any) -> str:
    found: dict[str, str] = {}
    for column, specs in columns.items():
        for name in dict.fromkeys(name for spec in specs for name in names(spec)):
            found[name] = found.get(name, "") + column
    groups: dict[str, list[str]] = {}
    for name, letters in found.items():
        groups.setdefault(letters, []).append(f"`{name}`")
    return "; ".join(f"{letters}: {', '.join(each)}" for letters, each in groups.items())


def blocks() -> Mapping[str, str]:
    """Return every block of the page by its name."""
    return {
        "endpoints": endpoints(),
        "fields": matrix(TEXT, "") + "\n\n" + without_effect(TEXT),
        "other-fields": matrix(OTHERS, ", "),
    }


def rendered(text: str) -> str:
    """Return the page with every block as it is declared now."""
    for name, block in blocks().items():
        around = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, n = around.subn(lambda found, block=block: f"{found[1]}\n{block}\n\n{found[2]}", text)
        if n != 1:
            raise ValueError(f"{PAGE.name} has {n} blocks called {name}")
    return text


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` only compare it."""
    old = PAGE.read_text(encoding="utf-8")
    new = rendered(old)
    if arguments == ["--check"]:
        if old != new:
            sys.stderr.write("docs/reference/http.md is stale; run `make docs` and commit it.\n")
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
