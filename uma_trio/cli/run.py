"""`uma-trio run` and `uma-cli`: send one prompt, print the answer and its figures.

Only the text goes to standard output. Figures go to standard error, if that is a terminal. Ctrl-C
cancels the request in the daemon before this program ends.
"""

from __future__ import annotations

import signal
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from attrs import evolve, fields, frozen

from uma_trio.cli.answer_flags import STDIN, AnswerFlags, left_unread, prompt_of, tools_of
from uma_trio.cli.attempt import attempt, starter
from uma_trio.cli.output import INTERRUPTED, OK, USAGE, complain, how_to_ask, socket_path
from uma_trio.cli.parser import FIELDS, Parameter
from uma_trio.cli.printer import Printer, WaitLine
from uma_trio.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio import CancelScope

    from uma_trio.client import Client, Generation


@frozen(kw_only=True)
class Asking(AnswerFlags):
    """The flags that `uma-trio run` and `uma-cli` share."""

    prompt: Annotated[
        str | None, Parameter(help="The prompt, instead of words or standard input.")
    ] = None
    n: Annotated[
        int,
        Parameter(
            help="The number of answers, each printed under a heading; the prompt is computed once."
        ),
    ] = 1
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
        bool,
        Parameter(
            negative="--no-stream",
            help="Print the answer as it is generated, or all of it at the end.",
        ),
    ] = True
    metrics: Annotated[
        bool, Parameter(help="Print the daemon's metrics as JSON instead of sending a prompt.")
    ] = False
    json: Annotated[bool, Parameter(help="Print one JSON object at the end.")] = False

    @property
    def _more(self) -> dict[str, Any]:
        found = {"n": self.n, "stream": self.stream}
        if self.tools is None:
            return found
        from msgspec import ValidationError, convert

        from uma_protocol import Tool

        try:
            tools = convert(tools_of(self.tools), tuple[Tool, ...])
        except ValidationError as error:
            raise ConfigError(f"{self.tools}: {error}") from error
        return {**found, "tools": tools, "tool_choice": self.tool_choice}


Chat = Annotated[
    bool | None,
    Parameter(
        name="--chat",
        negative="--raw",
        help="Send the prompt as a chat message through the model's chat template, or unchanged.",
    ),
]
_NOTHING = Asking()
Flags = Annotated[Asking, Parameter(name=FIELDS)]


Words = Annotated[str, Parameter(help="The prompt. The word - is standard input.")]


def run(*words: Words, chat: Chat = None, asking: Flags = _NOTHING) -> int:
    """Send one prompt and print the answer as it is generated.

    The prompt is given as words, by --prompt, or on standard input (one final line break is dropped).
    The word - is standard input: git diff | uma-trio run "What does this change?" -
    Without --chat or --raw the model's chat template is used if there is one.
    """
    return _answer(words, chat, asking, "uma-trio")


def cli(*words: Words, chat: Chat = None, asking: Flags = _NOTHING) -> int:
    """Send one prompt, unchanged unless --chat is given, and print the answer as it is generated.

    The prompt is given as words, by --prompt, or on standard input (one final line break is dropped).
    Exit status: 0 success, 1 bad arguments, 2 refused by the daemon, 3 no daemon reached, 130 Ctrl-C.
    """
    return _answer(words, chat, asking, "uma-cli")


def _answer(words: tuple[str, ...], chat: bool | None, asking: Asking, program: str) -> int:
    problem = _contradiction(words, chat, asking)
    if problem:
        complain(problem)
        return USAGE
    if asking.metrics:
        from uma_trio.cli.metrics import metrics

        return metrics(json=True, socket=asking.socket)
    prompt = prompt_of(words, asking.prompt)
    if not prompt and sys.stdin.isatty() and sys.stdout.isatty():
        return _converse(chat, asking)
    if not prompt:
        complain(f"There is no prompt. Try: {how_to_ask(socket_path(asking.socket))}")
        return USAGE
    if program == "uma-cli" and chat is None:
        chat = _implies_chat(asking)
    asking = asking if asking.app else evolve(asking, app=program)
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


def _converse(chat: bool | None, asking: Asking) -> int:
    """Start a conversation with the options that it has; refuse the others by name."""
    from uma_trio.cli.chat import chat as talk

    shared = {each.name for each in fields(AnswerFlags)}
    others = [
        f"--{each.name.replace('_', '-')}"
        for each in fields(Asking)
        if each.name not in shared and getattr(asking, each.name) != getattr(_NOTHING, each.name)
    ]
    others += ["--raw"] if chat is False else []
    if others:
        complain(f"Without a prompt this is a conversation, which has no {' or '.join(others)}.")
        return USAGE
    return talk(asking=AnswerFlags(**{name: getattr(asking, name) for name in shared}))


def _check(prompt: str, asking: Asking) -> None:
    """Raise :class:`ConfigError` about what every daemon refuses, before one is connected to."""
    from uma_protocol import DEFAULT_MAX_FRAME_BYTES, Message

    if (length := len(prompt.encode())) > DEFAULT_MAX_FRAME_BYTES:
        raise ConfigError(
            f"The prompt is {length} bytes long, and a request on the socket has at most "
            f"{DEFAULT_MAX_FRAME_BYTES}; shorten it, or ask over HTTP."
        )
    has_messages = asking.tools is not None
    asking.check(
        **({"messages": (Message("user", prompt),)} if has_messages else {"prompt": prompt})
    )


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
            # The model has no chat template, and none is required.
            if error.code != "E_MODEL_002" or chat is not None or _implies_chat(asking):
                raise
    async with connect(socket) as client:
        return await _stream(client, prompt, False, asking, printer, WaitLine(socket))


async def _stream(
    client: Client, prompt: str, chat: bool, asking: Asking, printer: Printer, line: WaitLine
) -> int:
    import trio

    from uma_trio.client import ServerError

    messages = [("user", prompt)]
    if asking.system is not None:
        messages.insert(0, ("system", asking.system))
    text: dict[str, Any] = {"messages": messages} if chat else {"prompt": prompt}
    generation = client.generate(**text, **asking.parameters)
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
