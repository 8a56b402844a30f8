"""The flags that say how one answer is to be made: those of `run`, `uma-cli` and `chat`.

The annotations are evaluated here: parsers evaluate those that are text where a class inherits them.
"""

import fcntl
import os
import stat
import sys
import termios
from collections.abc import Sequence
from functools import cached_property
from json import loads
from pathlib import Path
from typing import Annotated, Any, Final

from attrs import fields_dict, frozen

from uma_trio.cli.output import SocketFlag, StartFlag, WaitFlag
from uma_trio.cli.parser import Parameter
from uma_trio.config.errors import ConfigError
from uma_trio.words import Awaits, Lane, Pace, Speculation

DEFAULT_TEMPERATURE: Final = 0.7
"""Of `run` and `chat`, and of the page."""
STDIN = "-"
"""The word for standard input."""
_BETWEEN = "\n\n"
_TOOLS = '[{"name": ..., "description": ..., "parameters": a JSON Schema}, ...]'


@frozen(kw_only=True)
class AnswerFlags:
    """The options of an answer, alone or in a conversation. Those without help are described by the protocol."""

    system: Annotated[
        str | None, Parameter(help="A system message; with run and uma-cli it implies --chat.")
    ] = None
    max_tokens: Annotated[
        int | None,
        Parameter(
            help="The maximum number of tokens of the answer; default: the daemon's --max-tokens."
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Parameter(
            name=("--temperature", "--temp"),
            help="The sampling temperature; 0 always takes the most likely token; default: the model's own, or 0.7.",
        ),
    ] = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop: Annotated[
        tuple[str, ...],
        Parameter(help="End the answer before this text; may be given up to 8 times."),
    ] = ()
    schema: Annotated[
        Path | None, Parameter(help="A file with a JSON Schema; the answer is an instance of it.")
    ] = None
    grammar: Annotated[
        Path | None, Parameter(help="A file with a grammar (GBNF or Lark); the answer matches it.")
    ] = None
    model: Annotated[
        str | None, Parameter(help="Which of the daemon's models answers; default: the first.")
    ] = None
    priority: Lane = "interactive"
    session: Annotated[
        str | None,
        Parameter(
            help="A name for a conversation: its prefix stays in the cache for a while. It keeps no "
            "messages; `uma-trio chat` does."
        ),
    ] = None
    cache: str | None = None
    speculation: Speculation | None = None
    pace: Pace = "smooth"
    awaits: Awaits | None = None
    app: Annotated[str | None, Parameter(help="The name of the program in `uma-trio ps`.")] = None
    socket: SocketFlag = None
    wait: WaitFlag = True
    start: StartFlag = None

    @staticmethod
    def descriptions() -> dict[str, str]:
        """Return the protocol's descriptions of the fields of a request, as sentences."""
        from uma_protocol import Generate
        from uma_protocol.schema import fields_of

        notes = {field.name: field.note.replace("`", "") for field in fields_of(Generate)}
        return {name: f"{note[:1].upper()}{note[1:]}." for name, note in notes.items()}

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The fields of a request besides its prompt. Files are read once. Raises :class:`ConfigError`."""
        from uma_protocol import Generate

        named = [name for name in fields_dict(AnswerFlags) if name in Generate.__struct_fields__]
        fields = {name: getattr(self, name) for name in named}
        fields["schema"] = None if self.schema is None else json_of(self.schema)
        fields["grammar"] = None if self.grammar is None else text_of(self.grammar)
        fields["default_temperature"] = DEFAULT_TEMPERATURE
        return fields | self._more

    @property
    def _more(self) -> dict[str, Any]:
        return {}

    def check(self, **prompt: Any) -> None:
        """Raise :class:`ConfigError` about a value that every daemon refuses, before one is connected to."""
        from uma_protocol import Generate, LocalProtocolError, encode_request

        try:
            encode_request(Generate(id="-", **prompt, **self.parameters))
        except LocalProtocolError as error:
            from uma_trio.cli.attempt import sentence

            raise ConfigError(f"{sentence(error)} See --help.") from error


def prompt_of(words: Sequence[str], given: str | None) -> str:
    """Return the prompt: `given`, the words, or standard input if there are no words.

    The first word ``-`` is replaced by standard input, as a paragraph of its own. Without it standard input is
    not read: in a shell's loop over the lines of a file it is that file.

    Raises:
        ConfigError: some of it is not UTF-8 text.
    """
    if given is not None:
        return _text(given)
    if not words:
        return _standard_input()
    if STDIN not in words:
        return _text(" ".join(words))
    at = words.index(STDIN)
    before, after = (_text(" ".join(some)) for some in (words[:at], words[at + 1 :]))
    return _BETWEEN.join(part for part in (before, _standard_input(), after) if part)


def left_unread() -> bool:
    """Whether standard input is a pipe or file with text that was not read."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return False
        waiting = fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, b"\0" * 4)
    except (OSError, ValueError):
        return False
    return any(waiting)


def _standard_input() -> str:
    if sys.stdin.isatty():
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"Standard input is not UTF-8 text (byte {error.start}); convert it first."
        raise ConfigError(message) from error
    return text.removesuffix("\n")


def _text(typed: str) -> str:
    # Bytes of the command line that are not UTF-8 are surrogates here.
    try:
        typed.encode()
    except UnicodeEncodeError as error:
        message = f"The prompt is not UTF-8 text (character {error.start}); convert it first."
        raise ConfigError(message) from error
    return typed


def text_of(file: Path) -> str:
    """Return what a file says. Raises :class:`ConfigError`."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start})") from error


def json_of(file: Path) -> Any:
    """Return the JSON value in a file. Raises :class:`ConfigError`."""
    text = text_of(file)
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error


def tools_of(file: Path) -> tuple[dict[str, Any], ...]:
    """Return the tools in a file: a list of functions, by themselves or as OpenAI's API has them.

    Raises :class:`ConfigError`.
    """
    found = json_of(file)
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{file} is not a list of tools: write {_TOOLS}")
    return tuple(_tool(file, place, tool) for place, tool in enumerate(found))


def _tool(file: Path, place: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{file}: [{place}] is not a function with a name: write it as in {_TOOLS}"
        )
    names = ("name", "description", "parameters", "strict")
    return {name: function[name] for name in names if function.get(name) is not None}
