"""`uma-trio service`: the daemon as a service of this user, under systemd or launchd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from uma_trio.cli.output import OK, REFUSED, Trouble, complain, console
from uma_trio.cli.units import (
    HTTP_UNIT,
    LABEL,
    SERVICE_UNIT,
    SOCKET_UNIT,
    launch_agent,
    systemd_units,
)
from uma_trio.config import place
from uma_trio.library.hub_cache import cache_folder

if TYPE_CHECKING:
    from uma_trio.config.options import Config

Action = Literal["install", "uninstall", "start", "stop", "restart", "status", "logs"]
_NO_SYSTEMD = (
    "There is no systemd here to run the service; start the daemon with `uma-trio serve`, or by"
    " what starts programs on this machine."
)


def service(
    action: Annotated[
        Action,
        Parameter(
            help="install: write the service's files, and start it with the first request and at"
            " login. uninstall: stop it and remove them. start, stop, restart, status. logs: show"
            " what it logged, and what comes."
        ),
    ],
    /,
    *,
    show: Annotated[
        bool, Parameter(help="With install: print the files and change nothing.", negative="")
    ] = False,
) -> int:
    """Run the daemon as a service of this user.

    Its settings are those of ~/.config/uma-trio/config.yaml. Behind its socket no request is refused while
    it restarts: those that come wait for it.
    """
    try:
        if sys.platform == "darwin":
            return _launchd(action, show=show)
        return _systemd(action, show=show)
    except Trouble as trouble:
        complain(str(trouble))
        return REFUSED


def files_of_service(env: Mapping[str, str], command: Path) -> dict[Path, bytes]:
    """Return what `install` writes, by path: systemd's units for the settings of this user's file."""
    from uma_trio.config import settings

    named = {name: text for name, text in env.items() if name not in settings.known_env()}
    config = settings.load({}, named)
    folder = units_folder(env)
    http = config.http_address
    try:
        units = systemd_units(
            command, http, config.drain_s, _written_to(config), environment_of_service(env)
        )
    except OSError as error:
        raise Trouble(
            f"{config.source('http')}: {config.http} has no address here ({error.strerror}); give an address"
        ) from None
    return {folder / name: text.encode() for name, text in units.items()}


def environment_of_service(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a service must be told to find the models that this shell finds.

    A service manager knows nothing of a login shell's variables; the settings file has the rest.
    """
    home = Path.home()
    told = {}
    if (cache := cache_folder(env, home)) != cache_folder({}, home):
        told["HF_HUB_CACHE"] = str(cache.absolute())
    if store := env.get("OLLAMA_MODELS"):
        told["OLLAMA_MODELS"] = os.path.abspath(store)
    return told


def units_folder(env: Mapping[str, str]) -> Path:
    """Return where a user's units are (systemd.unit(5))."""
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config", "systemd", "user")


def _written_to(config: Config) -> tuple[Path, ...]:
    """Return the folders of files that the settings have the daemon write."""
    files = (config.trace, config.scorecard)
    return tuple({file.expanduser().absolute().parent for file in files if file is not None})


def _command() -> Path:
    """Return the program that the service starts: the one that runs, wherever it is installed."""
    running = Path(sys.argv[0])
    found = running if running.name == LABEL and running.is_file() else shutil.which(LABEL)
    if found is None:
        raise Trouble("uma-trio is not on the PATH; install it first (README, Install).")
    return Path(found).absolute()


def _systemd(action: Action, *, show: bool) -> int:
    if action == "install":
        return _install(files_of_service(os.environ, _command()), show=show)
    if action == "uninstall":
        return _uninstall()
    if shutil.which("systemctl") is None:
        raise Trouble(_NO_SYSTEMD)
    if not (units_folder(os.environ) / SERVICE_UNIT).exists():
        raise Trouble("The service is not installed; run `uma-trio service install`.")
    if action == "logs":
        return _run("journalctl", "--user", "--unit", SERVICE_UNIT, "--lines", "50", "--follow")
    if action == "stop":  # or the next request would start it
        return _run("systemctl", "--user", "stop", *_sockets(), SERVICE_UNIT)
    if action == "start":
        return _run("systemctl", "--user", "start", *_sockets(), SERVICE_UNIT)
    return _run("systemctl", "--user", action, SERVICE_UNIT)


def _install(files: Mapping[Path, bytes], *, show: bool) -> int:
    if show:
        for path, text in files.items():
            sys.stdout.write(f"# {path}\n{text.decode()}\n")
        return OK
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    folder = units_folder(os.environ)
    if folder / HTTP_UNIT not in files:
        (folder / HTTP_UNIT).unlink(missing_ok=True)
    console().print(f"Wrote {', '.join(path.name for path in files)} to {folder}.")
    if shutil.which("systemctl") is None:
        raise Trouble(_NO_SYSTEMD)
    status = _run("systemctl", "--user", "daemon-reload")
    if status == OK:
        status = _run("systemctl", "--user", "enable", "--now", *_sockets(), SERVICE_UNIT)
    if status == OK:
        settings_file = place.users_file(os.environ)
        console().print(
            f"The service runs, and starts again at login. Settings: {settings_file};"
            " after a change run `uma-trio service install` again."
        )
    return status


def _uninstall() -> int:
    folder = units_folder(os.environ)
    units = [name for name in (*_sockets(), SERVICE_UNIT) if (folder / name).exists()]
    if not units:
        console().print("The service is not installed.")
        return OK
    if shutil.which("systemctl") is not None:
        _run("systemctl", "--user", "disable", "--now", *units)
    for name in units:
        (folder / name).unlink()
    if shutil.which("systemctl") is not None:
        _run("systemctl", "--user", "daemon-reload")
    console().print(f"Removed {', '.join(units)} from {folder}. Settings and models are kept.")
    return OK


def _sockets() -> tuple[str, ...]:
    folder = units_folder(os.environ)
    return (SOCKET_UNIT, HTTP_UNIT) if (folder / HTTP_UNIT).exists() else (SOCKET_UNIT,)


def _launchd(action: Action, *, show: bool) -> int:
    agent = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    logs = Path.home() / "Library" / "Logs" / f"{LABEL}.log"
    domain = f"gui/{os.getuid()}"
    if action == "install":
        text = launch_agent(_command(), logs, environment_of_service(os.environ))
        if show:
            sys.stdout.write(f"# {agent}\n{text.decode()}\n")
            return OK
        agent.parent.mkdir(parents=True, exist_ok=True)
        agent.write_bytes(text)
        return _run("launchctl", "bootstrap", domain, str(agent))
    if action == "logs":
        return _run("tail", "-n", "50", "-F", str(logs))
    if action == "uninstall":
        status = _run("launchctl", "bootout", f"{domain}/{LABEL}")
        agent.unlink(missing_ok=True)
        return status
    name = f"{domain}/{LABEL}"
    commands: dict[str, tuple[str, ...]] = {
        "start": ("kickstart", name),
        "stop": ("kill", "SIGTERM", name),
        "restart": ("kickstart", "-k", name),
        "status": ("print", name),
    }
    return _run("launchctl", *commands[action])


def _run(*command: str) -> int:
    """Run a program of the system; its exit status is ours."""
    try:
        return subprocess.run(command, check=False).returncode  # noqa: S603 - fixed words and our own paths
    except FileNotFoundError:
        raise Trouble(f"There is no {command[0]} here, which this needs.") from None
