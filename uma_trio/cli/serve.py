"""`uma-trio serve`: options in, the daemon in the middle, one block of text when it is ready."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from uma_trio.cli.output import (
    ENGINE_DIED,
    OK,
    REFUSED,
    SOCKET_TAKEN,
    USAGE,
    command_at,
    complain,
    console,
    how_to_ask,
    leaves,
)
from uma_trio.cli.parser import Parameter
from uma_trio.config import settings
from uma_trio.config.option import Option
from uma_trio.config.options import ESSENTIAL, grouped
from uma_trio.config.settings import CONFIG_ENV, CONFIG_FLAG, RESERVED
from uma_trio.sockets.address import FRAMED_TCP
from uma_trio.words import count, duration, several, size

if TYPE_CHECKING:
    from rich.progress import Progress

    from uma_trio.app.daemon import ReadyInfo
    from uma_trio.backend.base import ContextLimits
    from uma_trio.backend.encoder import EncoderInfo
    from uma_trio.config.options import Config

_REPLACE = "replace"
_SLOW_S = 1.0  # a longer load gets a progress bar


def serve(**flags: object) -> int:
    """Load the model and serve it, until Ctrl-C.

    Flags take precedence over the environment, the environment over --config, and --config over defaults.
    """
    replace = bool(flags.pop(_REPLACE, False))
    config = settings.load(flags)
    from uma_trio.observe import log

    log.configure(config.log_level)
    return run_daemon(config, replace=replace)


def run_daemon(config: Config, *, replace: bool = False) -> int:
    """Serve until a signal; return the exit status. With `replace`, take over from the daemon that serves there."""
    import trio

    from uma_trio.app import daemon
    from uma_trio.backend.base import ModelError
    from uma_trio.config.errors import ConfigError
    from uma_trio.engine.inbox import EngineDied
    from uma_trio.sockets.handover import HandoverFailed
    from uma_trio.sockets.inherited import NotUsable, inherited_sockets
    from uma_trio.sockets.listener import SocketTaken, SocketUnusable
    from uma_trio.sockets.port import PortUnusable
    from uma_trio.sockets.supervisor import Supervisor

    progress = LoadProgress()
    supervisor = Supervisor.of(os.environ, os.getpid())
    try:
        inherited = inherited_sockets(os.environ)
    except NotUsable as error:
        complain(str(error))
        return USAGE

    async def daemon_main() -> None:
        await daemon.serve(
            config,
            on_ready=progress.ready,
            on_progress=progress.show,
            on_measuring=progress.measuring,
            inherited=inherited,
            supervisor=supervisor,
            replace=replace,
        )

    statuses: dict[type[BaseException], int] = {
        ConfigError: USAGE,
        ModelError: REFUSED,
        SocketTaken: SOCKET_TAKEN,
        HandoverFailed: SOCKET_TAKEN,
        SocketUnusable: USAGE,
        PortUnusable: SOCKET_TAKEN,
        EngineDied: ENGINE_DIED,
    }
    try:
        trio.run(daemon_main)
    except BaseException as error:
        for cause in leaves(error):
            for kind, status in statuses.items():
                if isinstance(cause, kind):
                    complain(str(cause))
                    return status
        raise
    finally:
        progress.stop()
    return OK


_MEASURING = "Measuring this machine"


class LoadProgress:
    """Bars on standard error while a large model loads and the machine is measured, then the ready block."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._bar_id: Any = None
        self._what = ""

    def show(self, share: float) -> None:
        """Show how much of the model is loaded, 0 to 1; nothing for a quick load."""
        if self._bar is not None or time.monotonic() - self._started >= _SLOW_S:
            self._show("Loading the model", share)

    def measuring(self, share: float) -> None:
        """Show how far the machine is measured, 0 to 1: the first time, which takes some seconds."""
        if self._what != _MEASURING and not sys.stderr.isatty():
            with suppress(OSError):
                sys.stderr.write(f"{_MEASURING}.\n")
        self._show(_MEASURING, share)

    def _show(self, what: str, share: float) -> None:
        if what != self._what:
            self.stop()
            self._what = what
        if self._bar is None:
            if not sys.stderr.isatty():
                return
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn(what), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console(stderr=True), transient=True)
            self._bar_id = self._bar.add_task("load", total=1.0)
            self._bar.start()
        self._bar.update(self._bar_id, completed=share)

    def ready(self, info: ReadyInfo) -> None:
        """Remove the bar and print what is served, where, and what to try."""
        self.stop()
        try:
            sys.stdout.write(ready_block(info, time.monotonic() - self._started))
            sys.stdout.flush()
        except OSError:
            return  # nothing reads the output; the daemon continues

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


_ENCODES: Final = {False: "embeds", True: "ranks"}


def ready_block(info: ReadyInfo, took_s: float) -> str:
    """Return the lines that `serve` prints once it accepts connections."""
    rows = [
        ("socket", _where(info.socket)),
        *([("http", _base_url(info.http, info.http_keys))] if info.http else []),
        *_page(info.http).items(),
        *([("note", info.http_missing)] if info.http_missing else []),
        *_writes(info),
        *((_ENCODES[one.ranks], _encoder(one)) for one in info.encoders),
    ]
    rows += [("try", _to_try(info)), ("stop", "Ctrl-C")]
    lines = [f"uma-trio is ready after {duration(took_s)}."]
    return "\n".join([*lines, *(f"  {name:<8} {value}" for name, value in rows)]) + "\n"


def _writes(info: ReadyInfo) -> list[tuple[str, str]]:
    model, limits = info.model, info.limits
    if limits is None:
        return []
    weights = f"{count(model.n_params)} parameters, {size(model.size_bytes)} of weights"
    return [
        ("model", f"{model.name} ({weights})"),
        *([("models", ", ".join(info.models))] if len(info.models) > 1 else []),
        ("context", info.chosen or _context(limits)),
        ("slots", f"{several(limits.n_slots, 'request')} at once"),
        ("backend", info.backend),
        ("policy", info.policy),
    ]


def _context(limits: ContextLimits) -> str:
    layout = "one KV cache for all"
    if limits.n_streams > 1:
        layout = f"{limits.n_streams} KV streams of {limits.n_ctx // limits.n_streams}"
    return f"{limits.n_ctx} tokens in all, {limits.n_ctx_seq} for one request ({layout})"


def _to_try(info: ReadyInfo) -> str:
    where = Path(_where(info.socket))
    if info.limits is not None:
        return how_to_ask(where)
    if any(not one.ranks for one in info.encoders):
        return command_at(where, "embed", '"a fox and a lantern"')
    return command_at(where, "rerank", '"a light in the wood" "a fox and a lantern" "the sea"')


def _encoder(info: EncoderInfo) -> str:
    makes = "scores" if info.ranks else f"vectors of {info.width} numbers"
    return f"{Path(info.path).stem} ({count(info.n_params)} parameters, {makes}, texts of {info.n_ctx} tokens)"


def _where(socket: str) -> str:
    """Return a socket's path from anywhere, or its TCP address."""
    return socket if socket.startswith(FRAMED_TCP) else os.path.abspath(socket)


def _page(http: str | None) -> dict[str, str]:
    # Browsers do not connect to Unix sockets.
    return {} if not http or http.startswith("unix:") else {"page": f"{http}/ui/"}


def _base_url(http: str, keys: Path | None) -> str:
    if http.startswith("unix:"):
        return http
    key = "=none" if keys is None else f" is in {keys}"
    return f"{http}/v1 (OPENAI_BASE_URL={http}/v1 OPENAI_API_KEY{key})"


def _parameter(item: Option, group: str) -> inspect.Parameter:
    """Return the flag of an option. Its value stays text, which `settings` structures."""
    about = [item.help, f"Default: {item.default_text}."]
    if item.bounds:
        about.append(f"Takes {item.bounds}.")
    about.append(f"Environment: {item.env[0]}.")
    kind: Any = bool | None if item.is_switch else str | None
    if item.repeats:
        kind = tuple[str, ...] | None
    shape = Parameter(
        name=item.flag,
        help=" ".join(about),
        negative=f"--no-{item.flag.removeprefix('--')}" if item.is_switch else "",
        metavar=None if item.is_switch else item.metavar or ("CHOICE" if item.choices else "N"),
        group=group,
        advanced=item.name not in ESSENTIAL,
    )
    return _keyword(item.key, Annotated[kind, shape])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _signature() -> inspect.Signature:
    parameters = [
        _parameter(item, heading) for heading, items in grouped().items() for item in items
    ]
    config = Parameter(
        name=CONFIG_FLAG,
        help=f"A YAML file with settings. Environment: {CONFIG_ENV}.",
        metavar="FILE",
        group="Settings file",
    )
    replacing = Parameter(
        name="--replace",
        help="Replace the daemon that serves there: load the model first, take over its sockets without refusing a "
        "request, and let it finish its requests. Both need memory for a while.",
        group="Upgrade",
    )
    reserved = [
        _keyword(item.key, Annotated[str | None, Parameter(name=item.flag, show=False)])
        for item in RESERVED
        if item.flag
    ]
    parameters += [
        _keyword("config", Annotated[str | None, config]),
        _keyword(_REPLACE, Annotated[bool | None, replacing]),
        *reserved,
    ]
    return inspect.Signature(parameters, return_annotation=int)


# The options are declared in `config` alone; the parser reads them from here.
_function: Callable[..., int] = serve
_function.__signature__ = _signature()  # type: ignore[attr-defined]  # functions do have it
