"""The texts of `uma-trio embed` and `uma-trio rerank`: arguments, files, lines of files or of standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from attrs import frozen

from uma_trio.cli.files import text_of
from uma_trio.cli.flags import Parameter
from uma_trio.config.errors import ConfigError

if TYPE_CHECKING:
    from uma_trio.client import ServerError

FilesFlag = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--file",
        help="A file that is one text; may be given several times.",
        metavar="FILE",
        negative="",
    ),
]
LinesFlag = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--lines",
        help="A file with a text on each line; may be given several times. Empty lines are left out.",
        metavar="FILE",
        negative="",
    ),
]

TruncateFlag = Annotated[
    bool,
    Parameter(
        help="Cut the end of a text that is too long for the model, instead of refusing it.",
        negative="",
    ),
]


@frozen
class Given:
    """A text. `told` is what results say of it, and `place` names it in a sentence."""

    text: str
    place: str
    told: tuple[str, str]

    @property
    def shown(self) -> str:
        """The text on one line, or the file that it is."""
        return " ".join(self.told[1].split())


def texts_of(words: Sequence[str], files: Sequence[Path], lines: Sequence[Path]) -> Iterator[Given]:
    """Yield every text: words, files, lines of files; without any of them the lines of standard input.

    Files are read when their texts are asked for.

    Raises:
        ConfigError: a file cannot be read, some text is not UTF-8, or a word or file is empty.
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


def refused(error: ServerError, given: Sequence[Given]) -> ServerError:
    """Return a daemon's refusal, with the names that texts have here."""
    from uma_trio.client.encoding import naming_texts

    def place(field: str, index: int) -> str:
        return given[index].place if index < len(given) else f"{field}[{index}]"

    return naming_texts(error, place)


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
        given.text.encode()  # the shell's bytes that are not UTF-8 come as halves of surrogate pairs
    except UnicodeEncodeError as error:
        message = f"{given.place} is not UTF-8 text (character {error.start}); convert it first."
        raise ConfigError(message) from error
    return given
