"""`uma-trio rerank`: documents by how well they fit a query."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attrs import frozen

from uma_trio.cli.attempt import attempt, starter
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import (
    OK,
    USAGE,
    SocketFlag,
    StartFlag,
    WaitFlag,
    complain,
    console,
    print_json,
    socket_path,
)
from uma_trio.cli.texts import FilesFlag, Given, LinesFlag, TruncateFlag, refused, texts_of
from uma_trio.words import harmless

if TYPE_CHECKING:
    from uma_protocol import Score


@frozen(kw_only=True)
class _Asked:
    query: str
    model: str | None
    top_n: int | None
    truncate: bool
    json: bool


def rerank(
    query: Annotated[str, Parameter(help="What documents are compared with.")],
    /,
    *documents: Annotated[str, Parameter(help="A document.")],
    file: FilesFlag = (),
    lines: LinesFlag = (),
    top_n: Annotated[
        int | None, Parameter(help="Print so many documents, the best ones; default: all.")
    ] = None,
    json: Annotated[
        bool,
        Parameter(
            help="Print a JSON object on each line: index, text or file, score.", negative=""
        ),
    ] = False,
    model: Annotated[
        str | None, Parameter(help="Which model; default: the daemon's first that scores.")
    ] = None,
    truncate: TruncateFlag = False,
    socket: SocketFlag = None,
    wait: WaitFlag = True,
    start: StartFlag = None,
) -> int:
    """Print documents with their score for a query, the best first.

    Documents are arguments, files, or lines of standard input. The daemon needs a model that scores.
    For example: uma-trio rerank "how to stop the daemon" --lines questions.txt --top-n 3
    """
    if not query:
        complain("The query is empty.")
        return USAGE
    if top_n is not None and top_n < 1:
        complain(f"--top-n: {top_n} is out of range, at least 1.")
        return USAGE
    given = list(texts_of(documents, file, lines))
    if not given:
        complain(
            "There is no document. Give documents as arguments, by --file, or a line each on standard input."
        )
        return USAGE
    where = socket_path(socket)
    asked = _Asked(query=query, model=model, top_n=top_n, truncate=truncate, json=json)
    return attempt(
        *(_rerank, where, given, asked),
        wait_at=where if wait else None,
        start=starter(where, start),
    )


async def _rerank(path: Path, given: Sequence[Given], asked: _Asked) -> int:
    from uma_trio.client import ServerError, connect

    async with connect(path) as client:
        try:
            found = await client.rerank(
                asked.query,
                [one.text for one in given],
                model=asked.model,
                top_n=asked.top_n,
                truncate=asked.truncate,
            )
        except ServerError as error:
            raise refused(error, given) from None
    for score in found.scores:
        _print(score, given[score.index], as_json=asked.json)
    return OK


def _print(score: Score, given: Given, *, as_json: bool) -> None:
    if as_json:
        kind, told = given.told
        print_json({"index": score.index, kind: told, "score": score.score})
    else:
        console().print(f"{score.score:10.4f}  {harmless(given.shown)}", soft_wrap=True)
