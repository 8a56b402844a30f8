"""The files of a daemon in the background: systemd's units, launchd's agent, the log."""

from __future__ import annotations

import os
import plistlib
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from uma_trio.cli.output import Trouble
from uma_trio.sockets.address import Address

LABEL = "uma-trio"
SOCKET_UNIT, HTTP_UNIT, SERVICE_UNIT = f"{LABEL}.socket", f"{LABEL}-http.socket", f"{LABEL}.service"

_SOCKET = """\
[Unit]
Description=uma-trio's socket: the first request starts the daemon

[Socket]
ListenStream=%t/uma-trio/uma.sock
FileDescriptorName=uma
SocketMode=0600
DirectoryMode=0700
Backlog=512

[Install]
WantedBy=sockets.target
"""

_HTTP = """\
[Unit]
Description=uma-trio's HTTP port: the first request starts the daemon

[Socket]
ListenStream={address}
FileDescriptorName=http
Service={service}
SocketMode=0600
DirectoryMode=0700
Backlog=512

[Install]
WantedBy=sockets.target
"""

# systemd.exec(5). PrivateDevices and MemoryDenyWriteExecute are not here: GPUs need the devices, and
# ctypes' callbacks memory that is written and executed. PrivateTmp neither: clients use /tmp/uma.sock.
# A user's manager can set up Protect* and Private* only with PrivateUsers.
_SERVICE = """\
[Unit]
Description=uma-trio: one language model for all programs of this user
Requires={sockets}
After={sockets}

[Service]
Type=notify
NotifyAccess=main
ExecStart={command} serve
{environment}Restart=on-failure
RestartSec=2s
# 75: another daemon has the socket. 1: a setting is wrong.
RestartPreventExitStatus=1 75
TimeoutStartSec=15min
TimeoutStopSec={stop_s}s
WatchdogSec=5min
LimitNOFILE=65536
CacheDirectory=uma-trio
UMask=0077
NoNewPrivileges=yes
PrivateUsers=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths=/tmp %t/uma-trio{writable}
ProtectProc=invisible
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
KeyringMode=private
CapabilityBoundingSet=
AmbientCapabilities=
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
{network}
[Install]
WantedBy=default.target
"""

_LOOPBACK_ONLY = "IPAddressDeny=any\nIPAddressAllow=localhost\n"


def units_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of a user's units (systemd.unit(5))."""
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config", "systemd", "user")


def log_file() -> Path:
    """Return the log of a daemon that `--start` starts. Raises :class:`Trouble`."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "uma-trio")
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Trouble(
            f"There is no place for the daemon's log: {state}: {error.strerror}; start it with `uma-trio serve`."
        ) from None
    return state / "serve.log"


def systemd_units(
    command: Path,
    http: Address | None,
    drain_s: float,
    writable: tuple[Path, ...] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the text of each unit by its file's name.

    `command` is what starts uma-trio. With an `http` address there is a unit for its socket; the
    service may reach other machines only if that address can be reached by them. `writable` are the
    folders of further files that the settings have the daemon write; `environment` is what a login shell
    says and a service manager does not know.

    Raises:
        OSError: the host of `http` has no address.
    """
    sockets = [SOCKET_UNIT] if http is None else [SOCKET_UNIT, HTTP_UNIT]
    units = {SOCKET_UNIT: _SOCKET}
    if http is not None:
        units[HTTP_UNIT] = _HTTP.format(address=_listen_stream(http), service=SERVICE_UNIT)
    units[SERVICE_UNIT] = _SERVICE.format(
        command=_word(command),
        environment="".join(
            f"Environment={_word(f'{name}={value}')}\n" for name, value in environment.items()
        ),
        sockets=" ".join(sockets),
        stop_s=round(drain_s) + 20,
        writable="".join(f" {_word(folder)}" for folder in writable),
        network=_LOOPBACK_ONLY if http is None or http.is_loopback else "",
    )
    return units


def launch_agent(
    command: Path, logs: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Return launchd's property list: started at login, and again when it fails."""
    about = {
        "Label": LABEL,
        "ProgramArguments": [str(command), "serve"],
        "EnvironmentVariables": dict(environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ProcessType": "Interactive",
        "StandardOutPath": str(logs),
        "StandardErrorPath": str(logs),
    }
    return plistlib.dumps(about)


def _listen_stream(http: Address) -> str:
    """Write an address as systemd.socket(5) wants it: it takes no names of hosts."""
    if http.path:
        return http.path.replace("%", "%%")
    found = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)
    host = str(found[0][4][0])
    return f"[{host}]:{http.port}" if ":" in host else f"{host}:{http.port}"


def _word(what: Path | str) -> str:
    """Write a word as systemd.syntax(7) wants it: `%` begins a specifier, and a space ends a word."""
    text = str(what).replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"')
    return f'"{text}"' if any(each in text for each in " \t\"'") else text
