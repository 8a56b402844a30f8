"""`uma-trio service` and `uma-trio logs`: the daemon in the background, under systemd or launchd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from uma_trio.cli.output import OK, REFUSED, Trouble, complain, say
from uma_trio.cli.parser import Parameter
from uma_trio.cli.units import (
    HTTP_UNIT,
    LABEL,
    SERVICE_UNIT,
    SOCKET_UNIT,
    launch_agent,
    log_file,
    systemd_units,
    units_folder,
)
from uma_trio.config.place import users_file
from uma_trio.library.stores import cache_folder

if TYPE_CHECKING:
    from uma_trio.config.options import Config

Action = Literal["install", "uninstall", "start", "stop", "restart", "status", "logs"]
_WITHOUT_SYSTEMD: Final = (
    "start the daemon with `uma-trio serve`, or in the background with `uma-trio run --start`, whose log"
    " `uma-trio logs` shows."
)
_LINES: Final = "50"


def service(
    action: Annotated[
        Action,
        Parameter(
            help="install: write the service's files, and start it with the first request and at"
            " login. uninstall: stop it and remove them. start, stop, restart, status. logs: the same as"
            " `uma-trio logs`."
        ),
    ],
    /,
    *,
    show: Annotated[
        bool, Parameter(help="With install: print the files and change nothing.")
    ] = False,
) -> int:
    """Run the daemon as a service of this user.

    Its settings are those of ~/.config/uma-trio/config.yaml. While it restarts its socket accepts requests, which
    wait.
    """
    if action == "logs":
        return logs()
    try:
        if sys.platform == "darwin":
            return _launchd(action, show=show)
        return _systemd(action, show=show)
    except Trouble as trouble:
        complain(str(trouble))
        return REFUSED


def logs(
    *,
    follow: Annotated[
        bool, Parameter(name=("--follow", "-f"), help="Continue with what is logged, until Ctrl-C.")
    ] = False,
) -> int:
    """Show the latest lines of the log: of the service, or of the daemon that `--start` started.

    A daemon in a terminal logs to that terminal.
    """
    try:
        if sys.platform == "darwin":
            return _show_file(_mac_log(), follow=follow)
        if (_units_folder() / SERVICE_UNIT).exists() and _has_journal():
            words = ("journalctl", "--user", "--unit", SERVICE_UNIT, "--lines", _LINES)
            return _run(*words, *(("--follow",) if follow else ("--no-pager",)))
        return _show_file(log_file(), follow=follow)
    except Trouble as trouble:
        complain(str(trouble))
        return REFUSED


def _has_journal() -> bool:
    """Whether the journal has an entry of the service."""
    words = ("journalctl", "--user", "--unit", SERVICE_UNIT, "--lines", "1", "--quiet")
    try:
        done = subprocess.run([*words, "--no-pager"], check=False, capture_output=True)  # noqa: S603
    except FileNotFoundError:
        return False
    return bool(done.stdout.strip())


def _show_file(path: Path, *, follow: bool) -> int:
    if not path.exists():
        raise Trouble(
            f"There is no log: {path} does not exist. A daemon in a terminal logs to that terminal; `uma-trio run --start` and "
            "`uma-trio service install` start one in the background."
        )
    return _run("tail", "-n", _LINES, *(("-F",) if follow else ()), str(path))


def files_of_service(env: Mapping[str, str], command: Path) -> dict[Path, bytes]:
    """Return what `install` writes, by path: systemd's units for the settings of this user's file."""
    from uma_trio.config import settings
    from uma_trio.config.http import HTTP_AUTO

    named = {name: text for name, text in env.items() if name not in settings.known_env()}
    config = settings.load({}, named)
    folder = units_folder(env)
    # No socket of systemd is made for the default port: if that is taken, the service would not start.
    http = None if config.http == HTTP_AUTO else config.http_address
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
    """Return the variables by which the service finds the models that this shell finds.

    A service manager does not have a login shell's variables; the settings file has the rest.
    """
    home = Path.home()
    found = {}
    if (cache := cache_folder(env, home)) != cache_folder({}, home):
        found["HF_HUB_CACHE"] = str(cache.absolute())
    if store := env.get("OLLAMA_MODELS"):
        found["OLLAMA_MODELS"] = os.path.abspath(store)
    return found


def _units_folder() -> Path:
    return units_folder(os.environ)


def _written_to(config: Config) -> tuple[Path, ...]:
    """Return the folders of files that the settings have the daemon write."""
    files = (config.trace, config.scorecard)
    return tuple({file.expanduser().absolute().parent for file in files if file is not None})


def _command() -> Path:
    """Return the program that the service starts: the one that is running, wherever it is installed."""
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
    if not (_units_folder() / SERVICE_UNIT).exists():
        raise Trouble("The service is not installed; run `uma-trio service install`.")
    _require_systemd()
    if action == "stop":  # or the next request would start it
        return _run("systemctl", "--user", "stop", *_sockets(), SERVICE_UNIT)
    if action == "start":
        return _run("systemctl", "--user", "start", *_sockets(), SERVICE_UNIT)
    return _run("systemctl", "--user", action, SERVICE_UNIT)


def _require_systemd() -> None:
    """Raise :class:`Trouble` unless systemd manages services of this user."""
    if shutil.which("systemctl") is None:
        raise Trouble(f"There is no systemd here to run a service; {_WITHOUT_SYSTEMD}")
    words = ("systemctl", "--user", "show-environment")
    done = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603 - fixed words
    if done.returncode != OK:
        why = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise Trouble(f"systemd runs no services of this user here ({why}); {_WITHOUT_SYSTEMD}")


def _install(files: Mapping[Path, bytes], *, show: bool) -> int:
    if show:
        for path, text in files.items():
            sys.stdout.write(f"# {path}\n{text.decode()}\n")
        return OK
    _require_systemd()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    folder = _units_folder()
    if folder / HTTP_UNIT not in files:
        (folder / HTTP_UNIT).unlink(missing_ok=True)
    say(f"Wrote {', '.join(path.name for path in files)} to {folder}.")
    status = _run("systemctl", "--user", "daemon-reload")
    if status == OK:
        status = _run("systemctl", "--user", "enable", "--now", *_sockets(), SERVICE_UNIT)
    if status == OK:
        say(
            f"The service runs, and starts again at login. Settings: {users_file(os.environ)};"
            " after a change run `uma-trio service install` again."
        )
    return status


def _uninstall() -> int:
    folder = _units_folder()
    units = [name for name in (*_sockets(), SERVICE_UNIT) if (folder / name).exists()]
    if not units:
        say("The service is not installed.")
        return OK
    has_systemd = shutil.which("systemctl") is not None
    if has_systemd:
        _run("systemctl", "--user", "disable", "--now", *units)
    for name in units:
        (folder / name).unlink()
    if has_systemd:
        _run("systemctl", "--user", "daemon-reload")
    say(f"Removed {', '.join(units)} from {folder}. Settings and models are kept.")
    return OK


def _sockets() -> tuple[str, ...]:
    return (SOCKET_UNIT, HTTP_UNIT) if (_units_folder() / HTTP_UNIT).exists() else (SOCKET_UNIT,)


def _mac_log() -> Path:
    return Path.home() / "Library" / "Logs" / f"{LABEL}.log"


def _launchd(action: Action, *, show: bool) -> int:
    agent = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    domain = f"gui/{os.getuid()}"
    if action == "install":
        text = launch_agent(_command(), _mac_log(), environment_of_service(os.environ))
        if show:
            sys.stdout.write(f"# {agent}\n{text.decode()}\n")
            return OK
        agent.parent.mkdir(parents=True, exist_ok=True)
        agent.write_bytes(text)
        return _run("launchctl", "bootstrap", domain, str(agent))
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
