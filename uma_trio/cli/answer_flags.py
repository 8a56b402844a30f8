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
from typing import Annotated, Any

from attrs import fields_dict, frozen

from uma_trio.cli.output import SocketFlag, StartFlag, WaitFlag
from uma_trio.cli.parser import Parameter
from uma_trio.config.errors import ConfigError
from uma_trio.words import Awaits, Lane, Pace, Speculation

STDIN = "-"
"""The word that stands for standard input."""
_BETWEEN = "\n\n"
_TOOLS = '[{"name": ..., "description": ..., "parameters": a JSON Schema}, ...]'


@frozen(kw_only=True)
class AnswerFlags:
    """What is asked of an answer, whether it is the only one or one of a conversation."""

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
            help="The sampling temperature; default: the model's, or 0, which always takes the most likely token.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(
            help="Sample from the most likely tokens whose probabilities sum to this; 1 is off; "
            "default: the model's, or 1."
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Parameter(
            help="Sample from this many most likely tokens; 0 is off; default: the model's, or 0."
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Parameter(
            help="Leave out tokens with less than this share of the most likely token's probability; 0 "
            "is off; default: the model's, or 0."
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        Parameter(
            help="Subtracted from the logit of each token that occurs in the answer, -2 to 2."
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Parameter(help="Subtracted once for each occurrence of the token in the answer, -2 to 2."),
    ] = None
    repeat_penalty: Annotated[
        float | None,
        Parameter(
            help="Divides the positive logits of recent tokens and multiplies the negative ones; 1 "
            "is off; default: the model's, or 1."
        ),
    ] = None
    repeat_last_n: Annotated[
        int | None,
        Parameter(
            help="The number of latest tokens of prompt and answer that count as recent; -1 is all."
        ),
    ] = None
    min_tokens: Annotated[
        int, Parameter(help="The model cannot end the answer before this many tokens.")
    ] = 0
    seed: Annotated[
        int | None,
        Parameter(
            help="The seed of the draws. The same seed gives the same draws, and the same answer where "
            "nothing else runs (docs/REPRODUCIBILITY.md)."
        ),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Parameter(help="End the answer before this text; may be given up to 8 times.", negative=""),
    ] = ()
    schema: Annotated[
        Path | None, Parameter(help="A file with a JSON Schema; the answer is an instance of it.")
    ] = None
    grammar: Annotated[
        Path | None, Parameter(help="A file with a grammar (GBNF or Lark); the answer matches it.")
    ] = None
    model: Annotated[
        str | None,
        Parameter(help="Which of the daemon's models answers; default: the first."),
    ] = None
    priority: Annotated[
        Lane,
        Parameter(help="The lane: interactive if a person waits for the answer, else background."),
    ] = "interactive"
    session: Annotated[
        str | None,
        Parameter(
            help="A name for a conversation: its prefix stays in the cache for a while. It keeps no "
            "messages; `uma-trio chat` does."
        ),
    ] = None
    cache: Annotated[
        str | None,
        Parameter(
            help="Who shares cached prefixes with this request: private, this process only; any other "
            "text, requests with the same text; default: every process of this user."
        ),
    ] = None
    speculation: Annotated[
        Speculation | None,
        Parameter(
            help="Speculative decoding, up to the daemon's own setting; default: auto, or off with --seed."
        ),
    ] = None
    pace: Annotated[
        Pace,
        Parameter(
            help="smooth: tokens may be delayed to arrive at even intervals while other requests use the "
            "machine; asap: each is sent when it is computed."
        ),
    ] = "smooth"
    awaits: Annotated[
        Awaits | None,
        Parameter(
            help="What somebody waits for: tokens, as they come; the end of the answer; nothing (in the "
            "background lane). Default: by the other options."
        ),
    ] = None
    app: Annotated[str | None, Parameter(help="The name of the program in `uma-trio ps`.")] = None
    socket: SocketFlag = None
    wait: WaitFlag = True
    start: StartFlag = None

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """What a request says beyond its prompt; files are read once.

        Raises :class:`ConfigError` about a file that cannot be read, or is not what it should be.
        """
        from uma_protocol import Generate

        named = [name for name in fields_dict(AnswerFlags) if name in Generate.__struct_fields__]
        said = {name: getattr(self, name) for name in named}
        said["schema"] = None if self.schema is None else json_of(self.schema)
        said["grammar"] = None if self.grammar is None else text_of(self.grammar)
        return said | self._more

    @property
    def _more(self) -> dict[str, Any]:
        """What only some verbs ask for."""
        return {}

    def check(self, **said: Any) -> None:
        """Raise :class:`ConfigError` about a flag that no daemon would take, before one is looked for."""
        from uma_protocol import Generate, LocalProtocolError, encode_request

        try:
            encode_request(Generate(id="-", **said, **self.parameters))
        except LocalProtocolError as error:
            from uma_trio.cli.attempt import sentence

            raise ConfigError(f"{sentence(error)} See --help.") from error


def prompt_of(words: Sequence[str], given: str | None) -> str:
    """Return the prompt: `given`, the words, or standard input where there are none.

    The first word ``-`` is replaced by standard input, as a paragraph of its own. Without it the
    words are all: in a shell's loop over the lines of a file standard input is that file.

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
    """Whether somebody piped text in that is in no prompt. A terminal's keys are not meant."""
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
    """Return `typed`. The shell's bytes that are not UTF-8 come as halves of surrogate pairs."""
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
