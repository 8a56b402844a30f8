"""`uma-trio embed`: the vectors of texts, as lines that other programs read."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

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
    json_line,
    socket_path,
)
from uma_trio.cli.texts import FilesFlag, Given, LinesFlag, TruncateFlag, refused, texts_of
from uma_trio.words import several

if TYPE_CHECKING:
    from array import array

Output = Literal["json", "base64", "plain"]
#: Texts of one request: their lines are printed before the next ones are sent.
_AT_ONCE: Final = 256
_DECIMALS: Final = 9  # of a number of at most 1: what a float32 holds


_PlainFlag = Annotated[
    bool,
    Parameter(
        help="Print the numbers of each vector, separated by spaces. Default: a JSON object on each line, with index, text or "
        "file, and embedding.",
        negative="",
    ),
]
_Base64Flag = Annotated[
    bool,
    Parameter(help="Print the float32 of each vector as base64 in its JSON.", negative=""),
]


@frozen(kw_only=True)
class _Asked:
    model: str | None
    dimensions: int | None
    truncate: bool
    output: Output


def embed(
    *texts: Annotated[str, Parameter(help="A text.")],
    file: FilesFlag = (),
    lines: LinesFlag = (),
    plain: _PlainFlag = False,
    base64: _Base64Flag = False,
    model: Annotated[
        str | None,
        Parameter(help="Which model; default: the daemon's first that makes vectors."),
    ] = None,
    dimensions: Annotated[
        int | None,
        Parameter(
            help="Keep so many numbers of each vector, for models that were trained for it; default: all."
        ),
    ] = None,
    truncate: TruncateFlag = False,
    socket: SocketFlag = None,
    wait: WaitFlag = True,
    start: StartFlag = None,
) -> int:
    """Print a vector of each text: of arguments, files, or lines of standard input.

    Vectors have length 1, so the product of two is their cosine. The daemon needs a model that makes them.
    For example: git log --format=%s | uma-trio embed --base64 >vectors.jsonl
    """
    given = texts_of(texts, file, lines)
    first = next(given, None)
    if first is None:
        complain(
            "There is no text. Give texts as arguments, by --file, or a line each on standard input."
        )
        return USAGE
    if plain and base64:
        complain("--plain and --base64: give one of them.")
        return USAGE
    if dimensions is not None and dimensions < 1:
        complain(f"--dimensions: {dimensions} is out of range, at least 1.")
        return USAGE
    where = socket_path(socket)
    output: Output = "plain" if plain else "base64" if base64 else "json"
    asked = _Asked(model=model, dimensions=dimensions, truncate=truncate, output=output)
    return attempt(
        *(_embed, where, _batches(first, given), asked),
        wait_at=where if wait else None,
        start=starter(where, start),
    )


def _batches(first: Given, rest: Iterator[Given]) -> Iterator[list[Given]]:
    some = [first, *islice(rest, _AT_ONCE - 1)]
    while some:
        yield some
        some = list(islice(rest, _AT_ONCE))


async def _embed(path: Path, batches: Iterator[list[Given]], asked: _Asked) -> int:
    from uma_trio.client import ServerError, connect

    began, n_texts, n_tokens = time.monotonic(), 0, 0
    async with connect(path) as client:
        for some in batches:
            try:
                found = await client.embed(
                    [one.text for one in some],
                    model=asked.model,
                    dimensions=asked.dimensions,
                    truncate=asked.truncate,
                )
            except ServerError as error:
                raise refused(error, some) from None
            for number, (one, vector) in enumerate(zip(some, found.vectors, strict=True), n_texts):
                sys.stdout.write(_line(number, one, vector, asked.output) + "\n")
            sys.stdout.flush()
            n_texts, n_tokens = n_texts + len(some), n_tokens + found.n_tokens
    if sys.stderr.isatty():
        took = time.monotonic() - began
        complain(f"{several(n_texts, 'text')}, {several(n_tokens, 'token')}, {took:.1f} s.")
    return OK


def _line(number: int, given: Given, vector: array[float], output: Output) -> str:
    if output == "plain":
        return " ".join(f"{x:.{_DECIMALS}g}" for x in vector)
    kind, told = given.told
    made: object = [round(x, _DECIMALS) for x in vector]
    if output == "base64":
        from base64 import b64encode

        little = vector if sys.byteorder == "little" else vector[:]
        if sys.byteorder == "big":
            little.byteswap()
        made = b64encode(little.tobytes()).decode()
    return json_line({"index": number, kind: told, "embedding": made})
