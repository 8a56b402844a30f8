"""Build the command line from the signatures of the verbs, with click.

A verb is a function. Positional-only parameters are arguments, keyword-only ones are options, and
:class:`Parameter` in their annotation describes them. Verbs are imported when they run.
"""

from __future__ import annotations

import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs
import click

from uma_trio import __version__
from uma_trio.cli.verbs import ABOUT, GROUPS, SYNONYMS, VERBS, Verb, is_installed

COMPLETE_VARIABLE = "_UMA_TRIO_COMPLETE"
FIELDS = "*"
"""The name of a parameter whose class has a field for each option."""
_HELP = ("--help", "-h")
_WIDEST = 100


@attrs.frozen(kw_only=True)
class Parameter:
    """Describe an argument or option of a verb.

    A switch may have a `negative`, such as `--no-NAME`. `many` values may follow one
    option. `rest` marks the words of another program. `show` is False for an option that no help lists,
    `advanced` is True for one that only `--help-all` lists.
    """

    help: str = ""
    name: str | tuple[str, ...] = ()
    negative: str = ""
    metavar: str | None = None
    group: str = ""
    many: bool = False
    rest: bool = False
    show: bool = True
    advanced: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The option's spellings, if they do not follow from the parameter's name."""
        return (self.name,) if isinstance(self.name, str) else self.name


class WrongArguments(Exception):
    """Arguments name no call of a verb. `verb` is the verb they begin with, "" if there is none."""

    def __init__(self, message: str, verb: str) -> None:
        super().__init__(message)
        self.verb = verb


def run_verbs(program: str, arguments: Sequence[str]) -> object:
    """Run the verb that `arguments` begin with. Raises :class:`WrongArguments`."""
    return _run(commands(), program, arguments)


def run_verb(program: str, name: str, verb: Callable[..., Any], arguments: Sequence[str]) -> object:
    """Run a program that is one verb. Raises :class:`WrongArguments`."""
    return _run(command_of(name, verb), program, arguments)


def commands() -> click.Group:
    """Return `uma-trio` with all its verbs, none of them imported."""
    return _Verbs("uma-trio", help=ABOUT, params=[_version()], context_settings=_CONTEXT)


def command_of(name: str, verb: Callable[..., Any]) -> Command:
    """Return the command of a verb."""
    return Command(name, verb)


_CONTEXT: Mapping[str, Any] = {"help_option_names": [*_HELP], "max_content_width": _WIDEST}


def _run(command: click.Command, program: str, arguments: Sequence[str]) -> object:
    try:
        return command.main(
            list(arguments),
            prog_name=program,
            complete_var=COMPLETE_VARIABLE,
            standalone_mode=False,
        )
    except click.UsageError as error:
        message, verb = _usage(error, program, arguments)
        raise WrongArguments(message, verb) from error
    except click.Abort:
        raise KeyboardInterrupt from None


def _usage(error: click.UsageError, program: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Return what is wrong with the arguments, and the verb they begin with."""
    from uma_trio.cli import foreign

    command = None if error.ctx is None else error.ctx.command
    verb = command.name or "" if isinstance(command, Command) else ""
    text = " ".join(error.format_message().split())
    if isinstance(error, click.NoSuchOption):
        option = error.option_name
        known = [name for param in command.params for name in param.opts] if command else []
        text = f"Unknown option: {option}."
        if ours := foreign.suggestion(verb, option, arguments):
            text = f"{text} {ours}"
        elif close := _nearest(option, known):
            text = f"{text} Did you mean {close}?"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        text = _bad_value(error, error.param)
    path = program if error.ctx is None else error.ctx.command_path
    return f"{text} See {path} --help.", verb


def _bad_value(error: click.BadParameter, param: click.Parameter) -> str:
    """Name an argument that is missing, or an option whose value is wrong, and what it takes."""
    is_argument = isinstance(param, click.Argument)
    name = (param.name or "").upper() if is_argument else param.opts[0]
    if not isinstance(error, click.MissingParameter):
        return f"{name}: {error.message}"
    if isinstance(param.type, click.Choice):
        return f"{name} is missing: {', '.join(map(str, param.type.choices))}."
    return f"{name} is missing: {getattr(param, 'about', '')}"


def _nearest(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, known, n=1, cutoff=0.6)), "")


def _version() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            click.echo(__version__)
            ctx.exit()

    return click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=show,
        help="Show the version.",
    )


class _Verbs(click.Group):
    """All verbs, by group."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "invoke_without_command": True})

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx._protected_args and not ctx.args:  # noqa: SLF001 - as click's own invoke
            click.echo(ctx.get_help())
            return 0
        return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, verb in VERBS.items() if is_installed(verb)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        if not is_installed(verb):
            return click.Command(
                cmd_name,
                callback=lambda: _not_installed(cmd_name, verb),
                context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
                add_help_option=False,
            )
        return command_of(cmd_name, load(cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in VERBS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        text = f"Unknown command: {name}."
        if close := SYNONYMS.get(name) or _nearest(name, self.list_commands(ctx)):
            text += f" Did you mean {close}?"
        raise click.UsageError(text, ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        found = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=VERBS[name].about) for name in found]

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "COMMAND [ARGUMENTS]")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        there = self.list_commands(ctx)
        for heading in GROUPS:
            rows = [(name, VERBS[name].about) for name in there if VERBS[name].group == heading]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        program = ctx.command_path
        formatter.write_paragraph()
        formatter.write_text(
            f"{program} COMMAND --help describes a command, {program} help config every setting, "
            f"{program} help metrics every figure, {program} --version the version."
        )


def load(name: str) -> Callable[..., Any]:
    """Import a verb."""
    verb = VERBS[name]
    found: Callable[..., Any] = getattr(importlib.import_module(verb.module), verb.function or name)
    return found


def _not_installed(name: str, verb: Verb) -> int:
    sys.stderr.write(f"{name} is not installed: pip install 'uma-trio[{verb.extra}]'.\n")
    return 2


class Command(click.Command):
    """A verb: its arguments and options follow from its signature."""

    def __init__(self, name: str, verb: Callable[..., Any]) -> None:
        self.verb = verb
        self.takers = [*_takers(verb)]
        super().__init__(
            name,
            params=[taker.param for taker in self.takers],
            help=inspect.cleandoc(verb.__doc__ or ""),
            context_settings={
                **_CONTEXT,
                "allow_interspersed_args": not any(t.parameter.rest for t in self.takers),
                "ignore_unknown_options": False,
            },
        )
        if any(taker.parameter.advanced for taker in self.takers):
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help="Show all options and exit.",
                )
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        try:
            super().parse_args(ctx, self._checked(ctx, args))
        except click.BadOptionUsage as error:
            raise click.UsageError(f"{error.option_name} needs a value.", ctx) from error
        if ctx.args and not ctx.resilient_parsing:
            from uma_trio.cli import foreign

            hint = foreign.model_hint(self.name or "", ctx.args)
            raise click.UsageError(f"Unexpected argument: {shlex.join(ctx.args)}.{hint}", ctx)
        return ctx.args

    def _checked(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat an option before each of its many values; refuse an option in place of a value."""
        if not ctx.allow_interspersed_args:
            return args
        options = {
            name: taker
            for taker in self.takers
            if isinstance(taker.param, click.Option)
            for name in (*taker.param.opts, *taker.param.secondary_opts)
        }
        known = {*options, *_HELP}
        found: list[str] = []
        rest = [*args]
        while rest:
            word = rest.pop(0)
            if word == "--":
                return [*found, word, *rest]
            found.append(word)
            taker = options.get(word)
            if taker is None or getattr(taker.param, "is_flag", False):
                continue
            if not rest:
                break  # reported by click, unless this completes a word
            if rest[0] in known and not ctx.resilient_parsing:
                raise click.UsageError(f"{word} needs a value, and {rest[0]} is an option.", ctx)
            found.append(rest.pop(0))
            while taker.parameter.many and rest and not rest[0].startswith("-"):
                found += [word, rest.pop(0)]
        return found

    def invoke(self, ctx: click.Context) -> Any:
        words: list[Any] = []
        named: dict[str, Any] = {}
        classes: dict[str, tuple[type, dict[str, Any]]] = {}
        for taker in self.takers:
            if taker.group:
                classes.setdefault(taker.group, (taker.owner or object, {}))
            name = taker.param.name or ""
            if ctx.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
                continue
            value = ctx.params[name]
            if isinstance(taker.param, click.Argument):
                words += value if taker.is_rest else [value]
            elif taker.group:
                classes[taker.group][1][taker.field] = value
            else:
                named[taker.field] = value
        named.update({group: cls(**fields) for group, (cls, fields) in classes.items()})
        return self.verb(*words, **named)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join([*self._usage(ctx), "[OPTIONS]"]))

    def _usage(self, ctx: click.Context) -> Iterator[str]:
        for taker in self.takers:
            if isinstance(taker.param, click.Argument):
                yield taker.param.make_metavar(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        is_all = bool(ctx.meta.get("all"))
        groups: dict[str, list[tuple[str, str]]] = {}
        for taker in self.takers:
            if taker.parameter.show and (is_all or not taker.parameter.advanced):
                argument = isinstance(taker.param, click.Argument)
                heading = "Arguments" if argument else taker.parameter.group or "Options"
                groups.setdefault(heading, []).append((taker.usage(), taker.parameter.help))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows, col_max=28)
        if not is_all and any(taker.parameter.advanced for taker in self.takers):
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all shows all options.")


def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


@attrs.frozen(kw_only=True)
class _Taker:
    """One argument or option of click's, and the parameter of the verb that receives its value.

    `group` is the parameter whose class `owner` has the field, "" if `field` is a parameter itself.
    """

    param: click.Parameter
    parameter: Parameter
    field: str
    group: str = ""
    owner: type | None = None
    is_rest: bool = False  # of a parameter like *words

    def described(self, text: str) -> _Taker:
        """Return it with a description."""
        return attrs.evolve(self, parameter=attrs.evolve(self.parameter, help=text))

    def usage(self) -> str:
        """Return the spellings with what stands for the value."""
        if isinstance(self.param, click.Argument):
            return self.parameter.metavar or self.field.upper()
        names = ", ".join((*self.param.opts, *self.param.secondary_opts))
        return names if getattr(self.param, "is_flag", False) else f"{names} {self.metavar}"

    @property
    def metavar(self) -> str:
        """What stands for the value of an option."""
        if self.parameter.metavar:
            return self.parameter.metavar
        if isinstance(self.param.type, click.Choice):
            return "|".join(map(str, self.param.type.choices))
        named = {"integer": "N", "float": "X", "path": "FILE"}
        return named.get(self.param.type.name, "TEXT")


def _takers(verb: Callable[..., Any]) -> Iterator[_Taker]:
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        kind, declared = _declared(parameter.annotation)
        if FIELDS in declared.names:
            hints, about = get_type_hints(kind, include_extras=True), kind.descriptions()
            for field in attrs.fields(kind):
                taker = _option(field.name, hints[field.name], group=name, owner=kind)
                yield taker if taker.parameter.help else taker.described(about[field.name])
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            several = parameter.kind is parameter.VAR_POSITIONAL
            needed = parameter.default is parameter.empty and not several
            yield _argument(name, parameter.annotation, several=several, needed=needed)
        elif parameter.kind is not parameter.VAR_KEYWORD:
            yield _option(name, parameter.annotation)


def _argument(name: str, hint: Any, *, several: bool, needed: bool) -> _Taker:
    kind, declared = _declared(hint)
    shown = declared.metavar or name.upper()
    is_rest = several
    if get_origin(kind) is tuple:
        kind, several = get_args(kind)[0], True
    param = click.Argument(
        [name],
        type=click.UNPROCESSED if declared.rest else _type(kind),
        nargs=-1 if several else 1,
        required=needed,
        metavar=f"[{shown}]..." if several else shown if needed else f"[{shown}]",
    )
    param.about = declared.help  # type: ignore[attr-defined]  # for a message about a missing one
    return _Taker(param=param, parameter=declared, field=name, is_rest=is_rest)


def _option(name: str, hint: Any, *, group: str = "", owner: type | None = None) -> _Taker:
    kind, declared = _declared(hint)
    names = declared.names or (f"--{name.replace('_', '-')}",)
    own = f"{group}__{name}" if group else name
    several = get_origin(kind) is tuple
    if kind is bool:
        spelled = [f"{names[0]}/{declared.negative}".removesuffix("/"), *names[1:]]
        param = click.Option([own, *spelled], is_flag=True, default=None)
    else:
        inner = get_args(kind)[0] if several else kind
        param = click.Option([own, *names], type=_type(inner), multiple=several)
    param.help = declared.help
    param.hidden = not declared.show
    return _Taker(param=param, parameter=declared, field=name, group=group, owner=owner)


def _declared(hint: Any) -> tuple[Any, Parameter]:
    """Return the type of a hint without None, and its description."""
    parameter = Parameter()
    if get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        parameter = next((one for one in more if isinstance(one, Parameter)), parameter)
    if get_origin(hint) in (UnionType, Union):
        left = [part for part in get_args(hint) if part is not type(None)]
        hint = left[0] if len(left) == 1 else hint
    return hint, parameter


def _type(kind: Any) -> click.ParamType[Any]:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    known: Mapping[Any, click.ParamType[Any]] = {
        int: click.INT,
        float: click.FLOAT,
        str: click.STRING,
    }
    return click.Path(path_type=Path) if kind is Path else known[kind]
