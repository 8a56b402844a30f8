"""The command line: what the verbs are called, and what their failures exit with.

Each verb is a module of its own, imported only when it runs. Command lines of client verbs that are
plain (:mod:`uma_trio.cli.flags`) do without cyclopts, which takes longer to import than they take to answer.
Exit statuses: 0 ok; 1 bad arguments; for clients 2 the server said no, 3 it could not be
reached or understood, 74 the answer could not be written, 130 Ctrl-C; for the daemon 2 unusable
model, 70 engine died, 75 the socket belongs to another daemon. `replay` and `simulate` end as `diff`
does: 1 a difference, 2 any trouble.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from uma_trio.cli import streams
from uma_trio.cli.flags import plain
from uma_trio.cli.output import CANNOT_WRITE, INTERRUPTED, OK, REFUSED, USAGE, complain
from uma_trio.cli.prompt import mark_stdin
from uma_trio.cli.verbs import EXTRAS, VERBS
from uma_trio.config.errors import ConfigError

#: Verbs whose plain command lines need no cyclopts.
_QUICK = frozenset(
    {
        "chat",
        "embed",
        "explain",
        "metrics",
        "models",
        "prefix",
        "priority",
        "ps",
        "rerank",
        "run",
        "stop",
        "top",
    }
)


def main() -> None:
    """Entry point of `uma-trio`."""
    given = sys.argv[1:]
    arguments = mark_stdin(given) if given[:1] == ["run"] else apart(given)
    sys.exit(answer(lambda: _verbs(arguments)))


def umad() -> None:
    """Entry point of `umad`: `uma-trio serve`, with or without the word."""
    from uma_trio.cli.serve import serve

    given = sys.argv[1:]
    sys.exit(answer(lambda: _verb("umad", "serve", serve, given[given[:1] == ["serve"] :])))


def uma_cli() -> None:
    """Entry point of `uma-cli`: `uma-trio run`, the prompt sent as it is."""
    from uma_trio.cli.run import cli

    arguments = mark_stdin(sys.argv[1:])
    sys.exit(
        answer(lambda: _plain(cli, arguments, lambda: _verb("uma-cli", "run", cli, arguments)))
    )


def _verbs(arguments: Sequence[str]) -> object:
    """Run the verb that `arguments` begin with."""

    def parsed() -> object:
        from uma_trio.cli.parser import run_verbs

        return run_verbs(arguments)

    name = "".join(arguments[:1])
    if name not in _QUICK:
        return parsed()
    verb = getattr(importlib.import_module(f"uma_trio.cli.{name}"), name)
    return _plain(verb, arguments[1:], parsed)


def _verb(program: str, name: str, verb: Callable[..., Any], arguments: Sequence[str]) -> object:
    from uma_trio.cli.parser import run_verb

    return run_verb(program, VERBS[name], verb, arguments)


def _plain(
    verb: Callable[..., Any], arguments: Sequence[str], otherwise: Callable[[], object]
) -> object:
    call = plain(verb, arguments)
    return otherwise() if call is None else verb(*call.words, **call.flags)


def apart(arguments: list[str]) -> list[str]:
    """Put ``--`` before the program that `launch` runs, so that its flags stay its own."""
    if arguments[:1] != ["launch"]:
        return arguments
    at = 1
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
        at += 1 if "=" in arguments[at] or arguments[at] in ("--help", "-h") else 2
    if arguments[at : at + 1] == ["--"]:
        return arguments
    return [*arguments[:at], "--", *arguments[at:]]


def answer(run: Callable[[], object]) -> int:
    """Run a command and return the exit status; what is wrong with it is said in a sentence."""
    streams.make_sound()
    try:
        status = run()
        sys.stdout.flush()
    except ConfigError as error:
        complain(str(error))
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Our reader left, as in `| head`.
        streams.forget_output()
        return 128 + 13
    except OSError as error:
        if not streams.cannot_write(error):
            raise
        complain(f"Standard output cannot be written: {error.strerror}.")
        streams.forget_output()
        return CANNOT_WRITE
    except Exception as error:
        status = _status_of_usage(error)
        if status is None:
            raise
        complain(str(error))
    return status if isinstance(status, int) else OK


def _status_of_usage(error: Exception) -> int | None:
    """Return the exit status for arguments that are wrong; None if `error` is about something else."""
    parser = sys.modules.get("uma_trio.cli.parser")  # only who was asked can complain
    if parser is None or not isinstance(error, parser.WrongArguments):
        return None
    like_diff = EXTRAS.get(error.verb) == "sim"
    return REFUSED if like_diff else USAGE


if __name__ == "__main__":
    main()
