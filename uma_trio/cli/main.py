"""The command line: what the verbs are called, and what their failures exit with.

Each verb is a module of its own, imported only when it runs, so that ``--help`` is quick.
Exit statuses: 0 ok; 1 bad arguments; for clients 2 the server said no, 3 it could not be
reached or understood, 74 the answer could not be written, 130 Ctrl-C; for the daemon 2 unusable
model, 70 engine died, 75 the socket belongs to another daemon. `replay` and `simulate` end as `diff`
does: 1 a difference, 2 any trouble.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError, UnusedCliTokensError

from uma_trio import __version__
from uma_trio.cli import foreign, streams
from uma_trio.cli.output import CANNOT_WRITE, INTERRUPTED, OK, REFUSED, USAGE, complain
from uma_trio.cli.prompt import mark_stdin
from uma_trio.config.option import ConfigError

_VERBS = {
    "serve": "Load the model and serve it on a Unix socket, until Ctrl-C.",
    "stop": "Stop the daemon, after its running requests.",
    "service": "Run the daemon as a service of this user: install, status, logs, and so on.",
    "logs": "Show what the service logged, and what comes.",
    "pull": "Fetch a model from Hugging Face's hub.",
    "models": "List the models on this machine, and which of them fit.",
    "chat": "Talk with the model in the terminal.",
    "run": "Send one prompt and print the answer as it comes.",
    "ps": "Show the requests in progress.",
    "priority": "Move a request to the interactive or the background lane.",
    "explain": "Show how the latest requests spent their time, or why one waited.",
    "prefix": "Show, clear or pin what the daemon keeps of your prompts.",
    "metrics": "Show the daemon's figures, once or repeatedly.",
    "launch": "Run a program that speaks OpenAI's API against the daemon's HTTP port.",
    "replay": "Plan every tick of a trace again, and say whether the plans are the same.",
    "simulate": "Compare policies in virtual time, on a modelled machine.",
    "doctor": "Look for what would keep the daemon from running, or from running fast.",
    "completion": "Print the completion of commands and flags for a shell, or install it.",
    "demo": "Start a private daemon and watch four clients stream at once.",
}
_ABOUT = "One machine, one model in memory, many applications."


def main() -> None:
    """Entry point of `uma-trio`."""
    app = commands()
    arguments = sys.argv[1:]
    reads = arguments[:1] == ["run"]
    sys.exit(answer(app, mark_stdin(arguments) if reads else apart(arguments)))


def commands() -> App:
    """Return `uma-trio` with all its verbs, none of them imported."""
    app = _app("uma-trio", _ABOUT)
    for verb, text in _VERBS.items():
        app.command(f"uma_trio.cli.{verb}:{verb}", name=verb, help=text)
    return app


def umad() -> None:
    """Entry point of `umad`: `uma-trio serve`, with or without the word."""
    from uma_trio.cli.serve import serve

    app = _app("umad", _VERBS["serve"])
    app.default(serve)
    arguments = sys.argv[1:]
    sys.exit(answer(app, arguments[1:] if arguments[:1] == ["serve"] else arguments))


def uma_cli() -> None:
    """Entry point of `uma-cli`: `uma-trio run`, the prompt sent as it is."""
    from uma_trio.cli.run import cli

    app = _app("uma-cli", _VERBS["run"])
    app.default(cli)
    sys.exit(answer(app, mark_stdin(sys.argv[1:])))


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


def answer(app: App, arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name and return the exit status."""
    streams.make_sound()
    try:
        status = app(
            list(arguments),
            exit_on_error=False,
            print_error=False,
            help_on_error=False,
            result_action="return_value",
        )
        sys.stdout.flush()
    except CycloptsError as error:
        complain(_usage(error, app.name[0]))
        like_diff = {"replay", "simulate"} & {*(error.command_chain or ())}
        return REFUSED if like_diff else USAGE
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
    return status if isinstance(status, int) else OK


def _usage(error: CycloptsError, name: str) -> str:
    """Return what is wrong with the arguments, and our flag where another server's was typed."""
    chain = error.command_chain or ()
    verb = {"umad": "serve", "uma-cli": "run"}.get(name) or "".join(chain[:1])
    text = " ".join(str(error).split())
    if isinstance(error, UnusedCliTokensError):
        unused = error.unused_tokens or []
        text = f"Unexpected argument: {shlex.join(unused)}."
        text += foreign.model_hint(verb, unused)
    elif isinstance(error, UnknownOptionError):
        flag = error.token.keyword or error.token.value
        if ours := foreign.suggestion(verb, flag, error.root_input_tokens or ()):
            text = f"Unknown option: {flag.partition('=')[0]}. {ours}"
    return f"{text} See {' '.join([name, *chain])} --help."


def _app(name: str, text: str) -> App:
    return App(
        name=name,
        help=text,
        version=__version__,
        version_flags=["--version"],
        help_flags=["--help", "-h"],
        help_format="plaintext",
        default_parameter=Parameter(show_default=False),
    )


if __name__ == "__main__":
    main()
