"""The parser of whatever is not plain: help, errors and every spelling that cyclopts knows."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import cyclopts
from cyclopts import App, CycloptsError, UnknownOptionError, UnusedCliTokensError

from uma_trio import __version__
from uma_trio.cli import foreign
from uma_trio.cli.flags import ALL_OF, Parameter
from uma_trio.cli.output import REFUSED, complain
from uma_trio.cli.verbs import ABOUT, EXTRAS, VERBS, module_of


class WrongArguments(Exception):
    """The arguments name no call of a verb; the message says what is wrong, and which help to read.

    `verb` is the verb they begin with; "" if there is none.
    """

    def __init__(self, message: str, verb: str) -> None:
        super().__init__(message)
        self.verb = verb


def commands() -> App:
    """Return `uma-trio` with all its verbs, none of them imported."""
    app = _app("uma-trio", ABOUT)
    for verb, text in VERBS.items():
        app.command(f"{__name__}:{verb}", name=verb, help=text)
    return app


def run_verbs(arguments: Sequence[str]) -> object:
    """Run the verb that `arguments` begin with. Raises :class:`WrongArguments`."""
    return _run(commands(), arguments)


def run_verb(name: str, about: str, verb: Callable[..., Any], arguments: Sequence[str]) -> object:
    """Run a program that is one verb. Raises :class:`WrongArguments`."""
    app = _app(name, about)
    app.default(declared(verb))
    return _run(app, arguments)


def __getattr__(verb: str) -> Callable[..., Any]:
    """Return a verb, with its arguments declared as cyclopts reads them."""
    try:
        module = importlib.import_module(module_of(verb))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(verb)
        if extra is not None and (error.name or "").startswith(f"uma_trio_{extra}"):
            return _absent(verb, extra)
        raise AttributeError(verb) from error
    return declared(getattr(module, verb))


def _absent(verb: str, extra: str) -> Callable[..., Any]:
    """Return what stands for a verb whose distribution is not installed."""

    def absent(
        *arguments: Annotated[str, cyclopts.Parameter(allow_leading_hyphen=True, show=False)],
    ) -> int:
        complain(f"{verb} is not installed: pip install 'uma-trio[{extra}]'.")
        return REFUSED

    absent.__doc__ = VERBS[verb]
    return absent


def declared(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the arguments of `verb` to cyclopts, in place, and return it."""
    hints = get_type_hints(verb, include_extras=True)
    for hint in hints.values():
        kind, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if any(isinstance(one, Parameter) and ALL_OF in one.name for one in more):
            declared(kind.__init__)
    verb.__annotations__.update({name: _translated(hint) for name, hint in hints.items()})
    return verb


def _translated(hint: Any) -> Any:
    """Return a hint with cyclopts' parameter behind ours, which stays for :func:`flags.plain`."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *more = get_args(hint)
    ours = [one for one in more if isinstance(one, Parameter)]
    return Annotated[(kind, *more, *map(_for_cyclopts, ours))]


def _for_cyclopts(item: Parameter) -> cyclopts.Parameter:
    known: dict[str, Any] = {
        "help": item.help or None,
        "name": item.name or None,
        "negative": item.negative,
        "metavar": item.metavar,
    }
    return cyclopts.Parameter(**{key: value for key, value in known.items() if value is not None})


def _run(app: App, arguments: Sequence[str]) -> object:
    try:
        return app(
            list(arguments),
            exit_on_error=False,
            print_error=False,
            help_on_error=False,
            result_action="return_value",
        )
    except CycloptsError as error:
        verb = "".join((error.command_chain or ())[:1])
        raise WrongArguments(_usage(error, app.name[0]), verb) from error


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
        default_parameter=cyclopts.Parameter(show_default=False),
    )
