"""`uma-trio embed` and `uma-trio rerank`: vectors of texts, and documents ranked for a query."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal

from attrs import frozen

from uma_trio.cli.answer_flags import text_of
from uma_trio.cli.attempt import attempt, starter
from uma_trio.cli.output import (
    OK,
    USAGE,
    JsonFlag,
    SocketFlag,
    StartFlag,
    WaitFlag,
    complain,
    console,
    json_line,
    print_json,
    socket_path,
)
from uma_trio.cli.parser import Parameter
from uma_trio.config.errors import ConfigError
from uma_trio.words import harmless, several

if TYPE_CHECKING:
    from array import array

    from uma_trio.client import ServerError

Output = Literal["json", "base64", "plain"]
#: Texts of one request; their lines are printed before the next request is sent.
_BATCH: Final = 256
_DIGITS: Final = 9  # a float32 of at most 1 needs no more

FilesFlag = Annotated[
    tuple[Path, ...],
    Parameter(name="--file", help="A file that is one text; may be repeated.", metavar="FILE"),
]
LinesFlag = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--lines",
        help="A file with a text on each line; may be repeated. Empty lines are skipped.",
        metavar="FILE",
    ),
]
TruncateFlag = Annotated[
    bool,
    Parameter(help="Cut the end of a text that is too long for the model, instead of refusing it."),
]


@frozen
class Given:
    """A text. `shown_as` is its field in results and that field's value; `place` names it in messages."""

    text: str
    place: str
    shown_as: tuple[str, str]


def embed(
    *texts: Annotated[str, Parameter(help="A text.")],
    file: FilesFlag = (),
    lines: LinesFlag = (),
    plain: Annotated[
        bool,
        Parameter(
            help="Print the numbers of each vector, separated by spaces. Default: a JSON object on each line, with "
            "index, text or file, and embedding."
        ),
    ] = False,
    base64: Annotated[
        bool, Parameter(help="Print the float32 of each vector as base64 in its JSON.")
    ] = False,
    model: Annotated[
        str | None, Parameter(help="Which model; default: the daemon's first that makes vectors.")
    ] = None,
    dimensions: Annotated[
        int | None,
        Parameter(
            help="Keep this many numbers of each vector, for models that were trained for it; default: all."
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
    path = socket_path(socket)
    output: Output = "plain" if plain else "base64" if base64 else "json"
    options = {"model": model, "dimensions": dimensions, "truncate": truncate}
    return attempt(
        *(_embed, path, _batches(first, given), options, output),
        wait_at=path if wait else None,
        start=starter(path, start),
    )


def rerank(
    query: Annotated[str, Parameter(help="What documents are compared with.")],
    /,
    *documents: Annotated[str, Parameter(help="A document.")],
    file: FilesFlag = (),
    lines: LinesFlag = (),
    top_n: Annotated[
        int | None, Parameter(help="Print this many documents, the best ones; default: all.")
    ] = None,
    json: JsonFlag = False,
    model: Annotated[
        str | None, Parameter(help="Which model; default: the daemon's first that scores.")
    ] = None,
    truncate: TruncateFlag = False,
    socket: SocketFlag = None,
    wait: WaitFlag = True,
    start: StartFlag = None,
) -> int:
    """Print documents with their score for a query, the best first.

    Documents are arguments, files, or lines of standard input. With --json each line is an object: index, text or
    file, score. The daemon needs a model that scores.
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
    path = socket_path(socket)
    options = {"model": model, "top_n": top_n, "truncate": truncate}
    return attempt(
        *(_rerank, path, query, given, options, json),
        wait_at=path if wait else None,
        start=starter(path, start),
    )


def texts_of(words: Sequence[str], files: Sequence[Path], lines: Sequence[Path]) -> Iterator[Given]:
    """Yield every text: words, files, lines of files; without any of them the lines of standard input.

    Files are read when their texts are needed.

    Raises:
        ConfigError: a file cannot be read, a text is not UTF-8, or a word or file is empty.
    """
    for number, word in enumerate(words, 1):
        yield _checked(Given(word, f"text {number}", ("text", word)))
    for path in files:
        yield _checked(Given(text_of(path), str(path), ("file", str(path))))
    for path in lines:
        try:
            with path.open("rb") as file:
                yield from _lines(file, str(path))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
    if not (words or files or lines) and not sys.stdin.isatty():
        yield from _lines(sys.stdin.buffer, "standard input")


def _lines(file: BinaryIO, name: str) -> Iterator[Given]:
    for number, line in enumerate(file, 1):
        place = f"line {number} of {name}"
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place} is not UTF-8 text (byte {error.start})") from error
        if text.strip():
            yield Given(text, place, ("text", text))


def _checked(given: Given) -> Given:
    if not given.text:
        raise ConfigError(f"{given.place} is empty")
    try:
        given.text.encode()  # bytes of the command line that are not UTF-8 are surrogates here
    except UnicodeEncodeError as error:
        message = f"{given.place} is not UTF-8 text (character {error.start}); convert it first."
        raise ConfigError(message) from error
    return given


def _refused(error: ServerError, given: Sequence[Given]) -> ServerError:
    """Return a refusal that names the texts as the user gave them."""
    from uma_trio.client.encoding import naming_texts

    def place(field: str, index: int) -> str:
        return given[index].place if index < len(given) else f"{field}[{index}]"

    return naming_texts(error, place)


def _batches(first: Given, rest: Iterator[Given]) -> Iterator[list[Given]]:
    some = [first, *islice(rest, _BATCH - 1)]
    while some:
        yield some
        some = list(islice(rest, _BATCH))


async def _embed(
    path: Path, batches: Iterator[list[Given]], options: dict[str, Any], output: Output
) -> int:
    from uma_trio.client import ServerError, connect

    began, n_texts, n_tokens = time.monotonic(), 0, 0
    async with connect(path) as client:
        for some in batches:
            try:
                found = await client.embed([one.text for one in some], **options)
            except ServerError as error:
                raise _refused(error, some) from None
            for number, (one, vector) in enumerate(zip(some, found.vectors, strict=True), n_texts):
                sys.stdout.write(_line(number, one, vector, output) + "\n")
            sys.stdout.flush()
            n_texts, n_tokens = n_texts + len(some), n_tokens + found.n_tokens
    if sys.stderr.isatty():
        took = time.monotonic() - began
        complain(f"{several(n_texts, 'text')}, {several(n_tokens, 'token')}, {took:.1f} s.")
    return OK


def _line(number: int, given: Given, vector: array[float], output: Output) -> str:
    if output == "plain":
        return " ".join(f"{x:.{_DIGITS}g}" for x in vector)
    kind, value = given.shown_as
    shown: object = [round(x, _DIGITS) for x in vector]
    if output == "base64":
        from base64 import b64encode

        little = vector[:]
        if sys.byteorder == "big":
            little.byteswap()
        shown = b64encode(little.tobytes()).decode()
    return json_line({"index": number, kind: value, "embedding": shown})


async def _rerank(
    path: Path, query: str, given: Sequence[Given], options: dict[str, Any], as_json: bool
) -> int:
    from uma_trio.client import ServerError, connect

    async with connect(path) as client:
        try:
            found = await client.rerank(query, [one.text for one in given], **options)
        except ServerError as error:
            raise _refused(error, given) from None
    for score in found.scores:
        kind, value = given[score.index].shown_as
        if as_json:
            print_json({"index": score.index, kind: value, "score": score.score})
        else:
            text = harmless(" ".join(value.split()))
            console().print(f"{score.score:10.4f}  {text}", soft_wrap=True)
    return OK
