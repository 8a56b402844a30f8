"""`uma-trio run` and `uma-cli`: send one prompt, print the answer and its figures.

Only the text goes to standard output. Figures go to standard error, if that is a terminal. Ctrl-C
cancels the request in the daemon before this program ends.
"""

from __future__ import annotations

import signal
import sys
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from attrs import evolve, frozen

from uma_trio.cli.attempt import attempt, starter
from uma_trio.cli.files import json_of, text_of, tools_of
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import (
    INTERRUPTED,
    OK,
    USAGE,
    SocketFlag,
    StartFlag,
    WaitFlag,
    complain,
    how_to_ask,
    socket_path,
)
from uma_trio.cli.printer import Printer
from uma_trio.cli.prompt import STDIN, left_unread, prompt_of
from uma_trio.cli.waiting import WaitLine
from uma_trio.config.errors import ConfigError
from uma_trio.words import Awaits, Lane, Pace, Speculation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio import CancelScope

    from uma_trio.client import Client, Generation


@frozen(kw_only=True)
class Asking:
    """The flags that `uma-trio run` and `uma-cli` share."""

    prompt: Annotated[
        str | None, Parameter(help="The prompt, instead of words or standard input.")
    ] = None
    system: Annotated[str | None, Parameter(help="A system message. Implies --chat.")] = None
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
            help="The sampling temperature; default: the model's, or 0, which always takes the most likely token; with "
            "--n the default is 0.8, because the answers would be equal.",
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
    n: Annotated[
        int,
        Parameter(
            help="The number of answers, each printed under a heading; the prompt is computed once."
        ),
    ] = 1
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
    tools: Annotated[
        Path | None,
        Parameter(
            help="A file with a JSON list of functions that the model may call, each with name, "
            "description and parameters. The calls are printed after the text, one line of JSON "
            "each."
        ),
    ] = None
    tool_choice: Annotated[
        Literal["auto", "required", "none"],
        Parameter(help="auto: the model may call; required: it must call; none: it does not call."),
    ] = "auto"
    stream: Annotated[
        bool, Parameter(help="Print the answer as it is generated, or all of it at the end.")
    ] = True
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
    metrics: Annotated[
        bool,
        Parameter(
            help="Print the daemon's metrics as JSON instead of sending a prompt.", negative=""
        ),
    ] = False
    json: Annotated[bool, Parameter(help="Print one JSON object at the end.", negative="")] = False

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """What the request says beyond its prompt; files are read once.

        Raises :class:`ConfigError` about a file that cannot be read, or is not what it should be.
        """
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repeat_penalty": self.repeat_penalty,
            "repeat_last_n": self.repeat_last_n,
            "min_tokens": self.min_tokens,
            "seed": self.seed,
            "n": self.n,
            "stop": self.stop,
            "schema": None if self.schema is None else json_of(self.schema),
            "grammar": None if self.grammar is None else text_of(self.grammar),
            "stream": self.stream,
            "model": self.model,
            "priority": self.priority,
            "session": self.session,
            "cache": self.cache,
            "speculation": self.speculation,
            "pace": self.pace,
            "awaits": self.awaits,
            "app": self.app,
            **self._calling,
        }

    @property
    def _calling(self) -> dict[str, Any]:
        if self.tools is None:
            return {}
        from msgspec import ValidationError, convert

        from uma_protocol import Tool

        try:
            tools = convert(tools_of(self.tools), tuple[Tool, ...])
        except ValidationError as error:
            raise ConfigError(f"{self.tools}: {error}") from error
        return {"tools": tools, "tool_choice": self.tool_choice}


Chat = Annotated[
    bool | None,
    Parameter(
        name="--chat",
        negative="--raw",
        help="Send the prompt as a chat message through the model's chat template, or unchanged.",
    ),
]
_NOTHING = Asking()
Flags = Annotated[Asking, Parameter(name="*")]


Words = Annotated[
    str,
    Parameter(help="The prompt. The word - stands for standard input."),
]


def run(*words: Words, chat: Chat = None, asking: Flags = _NOTHING) -> int:
    """Send one prompt and print the answer as it is generated.

    The prompt is given as words, by --prompt, or on standard input (one final line break is dropped).
    The word - stands for standard input: git diff | uma-trio run "What does this change?" -
    Without --chat or --raw the model's chat template is used if there is one.
    """
    return _answer(words, chat, _labelled(asking, "uma-trio"))


def cli(*words: Words, chat: Chat = None, asking: Flags = _NOTHING) -> int:
    """Send one prompt, unchanged unless --chat is given, and print the answer as it is generated.

    The prompt is given as words, by --prompt, or on standard input (one final line break is dropped).
    Exit status: 0 success, 1 bad arguments, 2 refused by the daemon, 3 no daemon reached, 130 Ctrl-C.
    """
    chat = chat or (chat is None and _implies_chat(asking))
    return _answer(words, chat, _labelled(asking, "uma-cli"))


def _labelled(asking: Asking, program: str) -> Asking:
    """Return what is asked, under the program's own label where `--app` gives none."""
    return asking if asking.app else evolve(asking, app=program)


def _answer(words: tuple[str, ...], chat: bool | None, asking: Asking) -> int:
    problem = _contradiction(words, chat, asking)
    if problem:
        complain(problem)
        return USAGE
    if asking.metrics:
        from uma_trio.cli.metrics import metrics

        return metrics(json=True, socket=asking.socket)
    prompt = prompt_of(words, asking.prompt)
    if not prompt and sys.stdin.isatty() and sys.stdout.isatty():
        from uma_trio.cli.chat import chat as talk

        return talk(
            system=asking.system or "",
            max_tokens=asking.max_tokens,
            socket=asking.socket,
            wait=asking.wait,
            start=asking.start,
        )
    if not prompt:
        complain(f"There is no prompt. Try: {how_to_ask(socket_path(asking.socket))}")
        return USAGE
    _check(prompt, asking)
    socket = socket_path(asking.socket)
    status = attempt(
        *(_talk, socket, prompt, chat, asking),
        wait_at=socket if asking.wait else None,
        start=starter(socket, asking.start),
    )
    if sys.stderr.isatty() and left_unread():
        complain(f"Standard input is not part of the prompt; put {STDIN} where it belongs.")
    return status


def _check(prompt: str, asking: Asking) -> None:
    """Raise about a flag that no daemon would take, before one is looked for."""
    from uma_protocol import (
        DEFAULT_MAX_FRAME_BYTES,
        Generate,
        LocalProtocolError,
        Message,
        encode_request,
    )

    if (length := len(prompt.encode())) > DEFAULT_MAX_FRAME_BYTES:
        raise ConfigError(
            f"The prompt is {length} bytes long, and a request on the socket has at most "
            f"{DEFAULT_MAX_FRAME_BYTES}; shorten it, or ask over HTTP."
        )
    try:
        said: dict[str, Any] = {"prompt": prompt}
        if asking.tools is not None:
            said = {"messages": (Message("user", prompt),)}
        encode_request(Generate(id="-", **said, **asking.parameters))
    except LocalProtocolError as error:
        from uma_trio.cli.spoken import sentence

        raise ConfigError(f"{sentence(error)} See uma-trio run --help.") from error


def _implies_chat(asking: Asking) -> bool:
    return asking.system is not None or asking.tools is not None


def _contradiction(words: tuple[str, ...], chat: bool | None, asking: Asking) -> str:
    if asking.metrics and (words or asking.prompt is not None):
        return "--metrics sends no prompt; omit the prompt or --metrics."
    if words and asking.prompt is not None:
        return "The prompt is given twice, as words and by --prompt; omit one of them."
    if asking.tools is not None and chat is False:
        return "--tools needs --chat: a raw prompt has no place for them."
    if asking.tools is None and asking.tool_choice == "required":
        return "--tool-choice required needs --tools: without them the model has nothing to call."
    if chat is False and asking.system is not None:
        return "--system needs --chat: a raw prompt has no place for it."
    return ""


async def _talk(socket: Path, prompt: str, chat: bool | None, asking: Asking) -> int:
    from uma_trio.client import ServerError, connect

    printer = Printer(as_json=asking.json, n=asking.n)
    async with connect(socket) as client:
        try:
            return await _stream(
                client, prompt, chat is not False, asking, printer, WaitLine(socket)
            )
        except ServerError as error:
            # The model has no chat template, and nobody insisted on one.
            if error.code != "E_MODEL_002" or chat is not None or _implies_chat(asking):
                raise
    async with connect(socket) as client:
        return await _stream(client, prompt, False, asking, printer, WaitLine(socket))


async def _stream(
    client: Client, prompt: str, chat: bool, asking: Asking, printer: Printer, line: WaitLine
) -> int:
    """Print one answer; on Ctrl-C end it in the daemon first."""
    import trio

    from uma_trio.client import ServerError

    messages = [("user", prompt)]
    if asking.system is not None:
        messages.insert(0, ("system", asking.system))
    said: dict[str, Any] = {"messages": messages} if chat else {"prompt": prompt}
    generation = client.generate(**said, **asking.parameters)
    refusal: ServerError | None = None
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on, interrupts, nursery.cancel_scope, printer)
            nursery.start_soon(line.run)
            try:
                async with aclosing(generation):
                    await _print_tokens(generation, printer, line)
            except ServerError as error:  # a nursery would wrap it
                refusal = error
            nursery.cancel_scope.cancel()
    if refusal is not None:
        if generation.eos is not None:
            printer.finish(generation.eos, generation.ends)
        raise refusal
    printer.finish(generation.eos, generation.ends)
    eos = generation.eos
    return INTERRUPTED if eos is None or eos.reason == "cancelled" else OK


async def _cancel_on(signals: AsyncIterator[int], scope: CancelScope, printer: Printer) -> None:
    async for _ in signals:
        printer.interrupted()
        scope.cancel()


async def _print_tokens(generation: Generation, printer: Printer, line: WaitLine) -> None:
    try:
        async for token in generation:
            line.end()
            printer.token(token)
            printer.over(generation.ends)
    finally:
        line.end()
        printer.rest()
