"""Write the tables of docs/HTTP.md from where endpoints and fields are declared.

python docs/render_http.py            writes them
python docs/render_http.py --check    says whether they are stale, and exits with 1 if so
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from uma_trio.api import embeddings, rerank, status
from uma_trio.api.anthropic.endpoint import Messages
from uma_trio.api.fields import Field
from uma_trio.api.llama import server as llama_server
from uma_trio.api.llama.completion import Completion
from uma_trio.api.ollama import fields as ollama_fields
from uma_trio.api.ollama import models as ollama_models
from uma_trio.api.ollama.endpoint import OllamaChat, OllamaGenerate
from uma_trio.api.openai.chat import ChatCompletions
from uma_trio.api.openai.completions import Completions
from uma_trio.api.responses.endpoint import Responses
from uma_trio.api.routes import ROUTES

PAGE = Path(__file__).resolve().parent / "HTTP.md"

_ACCESS = {
    "open": "everybody",
    "key": "a key, if keys are configured",
    "own": "as above, and no web page; one's own requests, or an operator",
    "operator": "an operator",
}


def endpoints() -> str:
    """Return the table of paths."""
    rows = [
        (
            f"`{route.method}`",
            f"`{route.path}{'NAME' if route.takes_more else ''}`",
            _about(route.handler),
            _ACCESS[route.access],
        )
        for route in ROUTES
    ]
    return _table(("method", "path", "what it does", "access"), rows)


def fields(declared: Sequence[Field]) -> str:
    """Return the table of the fields that are honoured, and the lists of the others."""
    rows = [
        (f"`{field.name}`", _rule(field), field.default, field.note)
        for field in declared
        if field.treatment == "honoured"
    ]
    parts = [_table(("field", "takes", "default", "note"), rows)]
    for treatment, said in (
        ("refused", "Refused with 400"),
        ("ignored", "Ignored, and named in `X-UMA-Ignored`"),
    ):
        names = [f"`{field.name}`" for field in declared if field.treatment == treatment]
        if names:
            parts.append(f"{said}: {', '.join(names)}.")
    return "\n\n".join(parts)


def blocks() -> Mapping[str, str]:
    """Return every block of the page by its name."""
    return {
        "endpoints": endpoints(),
        "chat": fields(ChatCompletions.fields),
        "completions": fields(Completions.fields),
        "responses": fields(Responses.fields),
        "messages": fields(Messages.fields),
        "completion": fields(Completion.fields),
        "ollama-chat": fields(OllamaChat.fields),
        "ollama-generate": fields(OllamaGenerate.fields),
        "ollama-options": fields(ollama_fields.OPTIONS),
        "ollama-show": fields(ollama_models.SHOW),
        "embeddings": fields(embeddings.EMBEDDINGS),
        "embedding": fields(embeddings.EMBEDDING),
        "ollama-embed": fields(embeddings.OLLAMA),
        "rerank": fields(rerank.RERANK),
        "tokenize": fields(llama_server.TOKENIZE),
        "priority": fields(status.PRIORITY),
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
            sys.stderr.write("docs/HTTP.md is stale; run `make docs` and commit it.\n")
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def _about(handler: object) -> str:
    return (handler.__doc__ or "").splitlines()[0]


def _rule(field: Field) -> str:
    return field.rule.text if field.rule is not None else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join((cell or "-").replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
