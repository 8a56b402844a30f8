"""`uma-trio chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attrs import evolve, field, mutable

from uma_trio.cli.answer_flags import AnswerFlags
from uma_trio.cli.attempt import run_when_served, sentence, starter
from uma_trio.cli.output import OK, UNREACHABLE, USAGE, Trouble, complain, leaves, socket_path
from uma_trio.cli.parser import FIELDS, Parameter
from uma_trio.cli.printer import WaitLine, Wrapped
from uma_trio.words import harmless, nearest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prompt_toolkit import PromptSession
    from trio import CancelScope

    from uma_protocol import Eos

_HELP = """\
/system TEXT   set the system message; - removes it; without TEXT show it
/again         answer the last question again
/more          continue an answer that was cut or stopped
/clear         forget the conversation
/save FILE     write the conversation, as JSON or as .md
/load FILE     load a conversation that was saved as JSON
/stats         show or hide tokens/s and the cached share after each answer
/model NAME    let another model answer; without NAME list them
/help          show this
/exit          leave, as Ctrl-D does

Enter sends, Alt-Enter begins a new line, pasted lines stay together.
Ctrl-C stops an answer."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


_NOTHING = AnswerFlags()
_LABEL = "uma-trio chat"


def chat(
    *,
    asking: Annotated[AnswerFlags, Parameter(name=FIELDS)] = _NOTHING,
    stats: Annotated[
        bool, Parameter(help="Show tokens/s and the cached share after each answer.")
    ] = False,
) -> int:
    """Talk with the model in the terminal. /help lists what else can be done there."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        complain("A conversation needs a terminal; for a single answer use `uma-trio run`.")
        return USAGE
    asking = asking if asking.app else evolve(asking, app=_LABEL)
    asking.check(prompt="-")
    return Talk(socket_path(asking.socket), asking, stats=stats).run()


@mutable
class Talk:
    """A conversation in the terminal."""

    _socket: Path
    _asking: AnswerFlags
    _conversation: Conversation = field(init=False)
    _stats: bool = field(kw_only=True, default=False)

    def __attrs_post_init__(self) -> None:
        self._conversation = Conversation(self._asking.system or "")

    def run(self) -> int:
        """Run the conversation and return the exit status."""
        status = self._greet()
        if status != OK:
            return status
        session = _prompt_session()
        while True:
            try:
                text = session.prompt("> ").strip()
            except KeyboardInterrupt:
                continue  # drops the line, as a shell does
            except EOFError:
                return OK
            if text in ("/exit", "/quit", "/bye"):
                return OK
            if text.startswith("/"):
                self._run_command(text)
            elif text:
                self._conversation.ask(text)
                self._answer()

    def _greet(self) -> int:
        names = self._ask_names()
        if names is None:
            return UNREACHABLE
        _say(
            f"{_DIM}{self._asking.model or names[0]}. /help lists commands; Ctrl-D leaves.{_PLAIN}\n"
        )
        return OK

    def _run_command(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        commands: Mapping[str, Callable[[str], None]] = {
            "/help": lambda _: _say(f"{_HELP}\n"),
            "/system": self._system,
            "/again": self._again,
            "/more": self._more,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._toggle_stats,
            "/model": self._model,
        }
        if command not in commands:
            hint = nearest(command, commands)
            _say(f"There is no command {command}{hint}; /help lists them.\n")
            return
        commands[command](rest.strip())

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "-" else text
        _say(f"System message: {self._conversation.system or 'none'}\n")

    def _again(self, _: str) -> None:
        talk = self._conversation
        before = list(talk.turns)
        if not talk.again():
            _say("There is no question yet.\n")
            return
        self._answer()
        if not talk.ends_with_answer:  # without a new answer the earlier one is kept
            talk.turns = before

    def _more(self, _: str) -> None:
        if self._conversation.ends_with_answer:
            self._answer()
        else:
            _say("There is no answer to continue.\n")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        _say("The conversation is forgotten.\n")

    def _save(self, name: str) -> None:
        self._with_file(name, self._conversation.save, "Saved to")

    def _load(self, name: str) -> None:
        self._with_file(name, self._conversation.load, "Loaded")

    def _with_file(self, name: str, do: Callable[[Path], None], done: str) -> None:
        if not name:
            _say("Name a file.\n")
            return
        path = Path(name).expanduser()
        try:
            do(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            _say(f"{path}: {why}.\n")
        else:
            _say(f"{done} {path}: {len(self._conversation.turns)} turns.\n")

    def _toggle_stats(self, _: str) -> None:
        self._stats = not self._stats
        _say(f"Figures are {'shown' if self._stats else 'hidden'}.\n")

    def _model(self, name: str) -> None:
        names = self._ask_names()
        if names is None:
            return
        if name:
            self._asking = evolve(self._asking, model=name)
        # A name that is not listed may be an alias or a variant; the daemon refuses others.
        others = [each for each in names if each != (self._asking.model or names[0])]
        _say(f"Model: {self._asking.model or names[0]}\n")
        if others:
            _say(f"Others: {', '.join(others)}\n")

    def _answer(self) -> None:
        talk = self._conversation
        shown = Wrapped(_say)
        answer: list[str] = []
        with _keys_unseen():
            eos = _run(
                _generate, self._socket, talk, self._asking, shown, answer, wait=self._asking.wait
            )
        shown.end()
        (talk.continued if talk.ends_with_answer else talk.answered)("".join(answer))
        if isinstance(eos, str):
            complain(eos)
            return
        if eos is not None and eos.reason == "length":
            _say(
                f"{_DIM}The answer was cut after {eos.usage.completion_tokens} tokens; /more continues.{_PLAIN}\n"
            )
        if eos is not None and self._stats:
            _say(f"{_DIM}{_figures(eos)}{_PLAIN}\n")

    def _ask_names(self) -> tuple[str, ...] | None:
        # None if no daemon answers, which was reported.
        found = _run(
            _models,
            self._socket,
            wait=self._asking.wait,
            start=starter(self._socket, self._asking.start),
        )
        if found is None or isinstance(found, str):
            complain(found or "Interrupted.")
            return None
        names: tuple[str, ...] = found
        return names


def _run(
    what: Callable[..., Any],
    socket: Path,
    *arguments: Any,
    wait: bool,
    start: Callable[[], bool] | None = None,
) -> Any:
    """Run something on trio; return the sentence about an error of the daemon or the connection."""
    from uma_protocol import ProtocolError
    from uma_trio.client import ConnectionFailed, ServerError

    try:
        return run_when_served(
            what, socket, *arguments, socket=socket if wait else None, start=start
        )
    except BaseException as error:
        for cause in leaves(error):
            if isinstance(cause, ServerError | ConnectionFailed | ProtocolError):
                return sentence(cause)
            if isinstance(cause, Trouble):
                return str(cause)
            if isinstance(cause, KeyboardInterrupt):
                return None
        raise


async def _models(socket: Path) -> tuple[str, ...]:
    from uma_trio.client import Client

    found = await Client(socket).overview()
    names = tuple(harmless(each.name) for each in found.models if each.gives == "text")
    return names or ("the model",)


async def _generate(
    socket: Path, talk: Conversation, asking: AnswerFlags, shown: Wrapped, answer: list[str]
) -> Eos | None:
    """Show one answer and append its pieces to `answer`. Return None after Ctrl-C, which ends it in the daemon."""
    import trio

    from uma_trio.client import ServerError, connect

    refusal: ServerError | None = None
    async with connect(socket) as client:
        generation = client.generate(
            messages=talk.messages,
            continue_final_message=talk.ends_with_answer,
            **asking.parameters,
        )
        with trio.open_signal_receiver(signal.SIGINT) as interrupts:
            async with trio.open_nursery() as nursery:
                line = WaitLine(socket)
                nursery.start_soon(_stop_on, interrupts, nursery.cancel_scope)
                nursery.start_soon(line.run)
                try:
                    async with aclosing(generation):
                        await _show(generation, shown, answer, line)
                except ServerError as error:  # a nursery would wrap it
                    refusal = error
                finally:
                    line.end()
                nursery.cancel_scope.cancel()
    if refusal is not None:
        raise refusal
    return generation.eos


async def _show(
    generation: AsyncIterator[Any], shown: Wrapped, answer: list[str], line: WaitLine
) -> None:
    thinking = False
    async for token in generation:
        line.end()
        if token.reasoning:
            if not thinking:
                _say(_DIM)
            thinking = True
            shown.put(harmless(token.reasoning))
        if token.text:
            if thinking:
                _say(_PLAIN)
                shown.end()
            thinking = False
            shown.put(harmless(token.text))
            answer.append(token.text)
    if thinking:
        _say(_PLAIN)


async def _stop_on(signals: AsyncIterator[int], scope: CancelScope) -> None:
    async for _ in signals:
        scope.cancel()


def _figures(eos: Eos) -> str:
    from uma_trio.cli.printer import figures

    usage = eos.usage
    share = usage.cached_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0
    return f"{figures(eos)}, {share:.0%} of the prompt cached"


def _prompt_session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    names = [line.split()[0] for line in _HELP.splitlines() if line.startswith("/")]
    path = _history_file()
    history = InMemoryHistory() if path is None else FileHistory(str(path))
    completer = WordCompleter(names, sentence=True)
    return PromptSession(
        history=history,
        key_bindings=keys,
        completer=completer,
        complete_while_typing=False,
        prompt_continuation="  ",
    )


def _history_file() -> Path | None:
    # Only this user may read it. None if it cannot be written.
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "uma-trio" / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return None
    return path


@contextmanager
def _keys_unseen() -> Iterator[None]:
    # Keys that are typed during an answer are read by the next question.
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


Turn = tuple[str, str]  # role, content


class Conversation:
    """The turns, with at most one system message before them. Does no output."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[Turn] = []

    @property
    def messages(self) -> list[Turn]:
        """The messages of a request."""
        return [("system", self.system), *self.turns] if self.system else list(self.turns)

    def ask(self, text: str) -> None:
        """Add a question. It replaces one without an answer, since templates require turns to alternate."""
        if self.turns and self.turns[-1][0] == "user":
            self.turns.pop()
        self.turns.append(("user", text))

    def answered(self, text: str) -> None:
        """Add an answer or its beginning; an empty one leaves the question open."""
        if text:
            self.turns.append(("assistant", text))

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last turn is an answer, which can be continued."""
        return bool(self.turns) and self.turns[-1][0] == "assistant"

    def continued(self, text: str) -> None:
        """Add to the latest answer."""
        role, content = self.turns[-1]
        self.turns[-1] = (role, content + text)

    def again(self) -> bool:
        """Remove the answer to the latest question; return whether there is a question."""
        asked = [n for n, (role, _) in enumerate(self.turns) if role == "user"]
        if asked:
            del self.turns[asked[-1] + 1 :]
        return bool(asked)

    def clear(self) -> None:
        """Remove every turn, but not the system message."""
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Write the conversation: messages as JSON, or as Markdown if the name ends in .md.

        Raises:
            OSError: the file cannot be written.
        """
        if path.suffix.lower() == ".md":
            text = "".join(f"## {role}\n\n{content}\n\n" for role, content in self.messages)
        else:
            stored = [{"role": role, "content": content} for role, content in self.messages]
            text = json.dumps(stored, ensure_ascii=False, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")

    def load(self, path: Path) -> None:
        """Load a conversation that :meth:`save` wrote as JSON.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not one; the conversation is unchanged.
        """
        stored = json.loads(path.read_text(encoding="utf-8"))
        try:
            turns = [(str(turn["role"]), str(turn["content"])) for turn in stored]
        except (TypeError, KeyError):
            raise ValueError("a list of objects with role and content is expected") from None
        if any(role not in ("system", "user", "assistant") for role, _ in turns):
            raise ValueError("a role is system, user or assistant")
        self.system = turns[0][1] if turns and turns[0][0] == "system" else ""
        self.turns = [turn for turn in turns if turn[0] != "system"]
