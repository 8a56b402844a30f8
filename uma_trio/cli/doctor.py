"""`uma-trio doctor`: what would keep the daemon from running or from running fast, and the fix."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import attrs

from uma_trio import __version__
from uma_trio.cli import checks
from uma_trio.cli.check_place import check_http, check_socket
from uma_trio.cli.check_running import asked, judge_running
from uma_trio.cli.checks import Finding
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import OK, USAGE, complain, console, how_to_ask, print_json
from uma_trio.config import settings
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config

_ParallelFlag = Annotated[
    str | None,
    Parameter(
        help="The number of slots to assume; --cost has a separate measurement for each number.",
        metavar="N",
    ),
]
_CostFlag = Annotated[
    bool,
    Parameter(
        help="Only print the time of a tick by its number of tokens on this machine. Loads the "
        "model.",
        negative="",
    ),
]
_FreshFlag = Annotated[
    bool,
    Parameter(help="With --cost: measure again instead of using stored measurements.", negative=""),
]
_TemplateFlag = Annotated[
    str | None,
    Parameter(
        help="Only print how the model writes tool calls and reasoning, from its chat template: a "
        "GGUF file or a template file.",
        metavar="FILE",
    ),
]
_ModelFlag = Annotated[
    str | None,
    Parameter(
        help="The model to check: a file or a name. Environment: UMA_MODEL.", metavar="MODEL"
    ),
]
_MARGIN = " " * 8  # under the text beside the mark
_LEAST_ROOM = 20  # columns


def doctor(
    model: _ModelFlag = None,
    *,
    socket: Annotated[
        str | None, Parameter(help="The socket to check. Environment: UMA_SOCK.", metavar="PATH")
    ] = None,
    n_ctx: Annotated[str | None, Parameter(help="The context size to assume.", metavar="N")] = None,
    parallel: _ParallelFlag = None,
    http: Annotated[
        str | None,
        Parameter(help="The HTTP address to check. Environment: UMA_HTTP.", metavar="[HOST:]PORT"),
    ] = None,
    config: Annotated[
        str | None,
        Parameter(help="A YAML file with settings. Environment: UMA_CONFIG.", metavar="FILE"),
    ] = None,
    cost: _CostFlag = False,
    fresh: _FreshFlag = False,
    template: _TemplateFlag = None,
    json: Annotated[bool, Parameter(help="Print JSON.", negative="")] = False,
) -> int:
    """Find problems that would stop or slow the daemon, and print their fixes.

    A daemon that runs is asked for its settings; with other options than --socket, those are judged instead.

    Exit status: 0 if the daemon can run, 1 if a problem prevents it.
    """
    flags = {
        "model": model,
        "socket": socket,
        "n_ctx": n_ctx,
        "parallel": parallel,
        "http": http,
        "config": config,
    }
    if cost:
        from uma_trio.cli.cost import show_cost

        return show_cost(settings.load(flags), fresh=fresh, as_json=json)
    if template is not None:
        from uma_trio.cli.template import show_template

        return show_template(Path(template), as_json=json)
    if fresh:
        complain("--fresh needs --cost.")
        return USAGE
    findings = examine(flags)
    if json:
        print_json([attrs.asdict(finding) for finding in findings])
    else:
        _show(findings, flags)
    return USAGE if any(finding.weight == "blocks" for finding in findings) else OK


def examine(flags: dict[str, str | None]) -> list[Finding]:
    """Return everything that was looked at."""
    system = f"uma-trio {__version__}, Python {platform.python_version()}, {platform.platform()}"
    findings = [Finding("system", "ok", system)]
    try:
        config = settings.load(flags)
    except ConfigError as error:
        findings.append(Finding("settings", "blocks", str(error)))
        config = Config()
    running = asked(config.socket)
    is_loaded = running.settings is not None and not _assumes(flags)
    if running.settings is not None and is_loaded:
        config = settings.load({**running.settings, "socket": str(config.socket)}, env={})
        told = f"those of the running daemon: {running.flags or 'its defaults'}"
        findings.append(Finding("settings", "ok", told))
    llama, served = checks.probe_llama(config.llama), config.each()
    models = [(each, _of_model(config, each, llama.devices)) for each in served]
    sound = [each for each, found in models if all(one.weight != "blocks" for one in found)]
    return [
        *findings,
        *checks.check_llama(llama),
        *checks.check_policy(config),
        *(one for _, found in models for one in found),
        *([] if is_loaded else checks.check_memory(served)),
        *([] if llama.status else checks.check_computing(sound)),
        *check_socket(config.socket),
        *judge_running(running),
        *check_http(config),
        *checks.check_limits(config),
        *checks.check_shapes(),
    ]


def _assumes(flags: dict[str, str | None]) -> bool:
    """Whether somebody asks about a daemon that is not started yet, and not about the one that runs."""
    return any(value is not None for name, value in flags.items() if name != "socket")


def _of_model(config: Config, served: Config, devices: Sequence[str]) -> list[Finding]:
    """Return what was found of one of the models; each says whose it is where there are several."""
    found = checks.check_model(served, devices)
    if served is config:
        return found
    name = checks.name_of(served)
    return [attrs.evolve(each, about=f"{each.about} of {name}") for each in found]


def _show(findings: list[Finding], flags: dict[str, str | None]) -> None:
    from rich.text import Text

    marks = {"ok": ("ok    ", "green"), "slow": ("slow  ", "yellow"), "blocks": ("BLOCKS", "red")}
    out = console()
    room = max(_LEAST_ROOM, out.width - len(_MARGIN))
    for finding in findings:
        mark, colour = marks[finding.weight]
        told = Text.assemble((f"{finding.about}: ", "bold"), finding.what)
        first, *more = told.wrap(out, room)
        out.print(Text.assemble((mark, colour), "  ", first), soft_wrap=True)
        more += Text(f"fix: {finding.fix}").wrap(out, room) if finding.fix else []
        for line in more:
            out.print(Text.assemble(_MARGIN, line), soft_wrap=True)
    out.print(_verdict(findings, flags), soft_wrap=True)


def _verdict(findings: list[Finding], flags: dict[str, str | None]) -> str:
    blocking = sum(finding.weight == "blocks" for finding in findings)
    slowing = sum(finding.weight == "slow" for finding in findings)
    if blocking:
        return f"{blocking} of these must be fixed before the daemon can run."
    if any(finding.about == "socket" and "is served by" in finding.what for finding in findings):
        return f"A daemon runs already: {how_to_ask(settings.load(flags).socket)}"
    if slowing:
        return f"The daemon can run; {slowing} of these would slow it down."
    given = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items() if value]
    return "The daemon can run: " + shlex.join(["uma-trio", "serve", *chain(*given)])
