"""Notifications to the program that supervises the daemon, as datagrams of sd_notify(3)."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping
from typing import Final

# A model is loaded in parts; between two of them no more than this may pass.
_LOADING_US: Final = 120_000_000


class Supervisor:
    """Notifies a supervisor, such as systemd, of the daemon's state; does nothing without one. Never blocks or raises."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else 0.0

    @classmethod
    def of(cls, env: MutableMapping[str, str], pid: int) -> Supervisor:
        """Return the supervisor in `env`, and remove its variables, so that no child process uses them."""
        address = env.pop("NOTIFY_SOCKET", "")
        return cls(address, _watchdog_s(env, pid))

    def loading(self, share: float) -> None:
        """Report how much of the model is loaded, and extend the start timeout."""
        self._notify(STATUS=f"loading the model, {share:.0%}", EXTEND_TIMEOUT_USEC=str(_LOADING_US))

    def measuring(self, share: float) -> None:
        """Report the progress of the measurement, and extend the start timeout."""
        self._notify(
            STATUS=f"measuring the machine, {share:.0%}", EXTEND_TIMEOUT_USEC=str(_LOADING_US)
        )

    def ready(self, what: str) -> None:
        """Report that clients can connect, and what is served."""
        self._notify(READY="1", STATUS=what)

    def alive(self) -> None:
        """Report that the engine computes, or has nothing to compute."""
        self._notify(WATCHDOG="1")

    def stopping(self, drain_s: float) -> None:
        """Report that the daemon drains, and how long that may take."""
        self._notify(
            STOPPING="1",
            STATUS="finishing the running requests",
            EXTEND_TIMEOUT_USEC=str(int((drain_s + 20) * 1e6)),
        )

    def _notify(self, **fields: str) -> None:
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(text.encode(), self._address)
        except OSError:
            return


def _watchdog_s(env: MutableMapping[str, str] | Mapping[str, str], pid: int) -> float:
    """Return the watchdog interval in seconds (sd_watchdog_enabled(3)); 0 if there is none."""
    wanted, of = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", str(pid))
    if not wanted.isdecimal() or of != str(pid):
        return 0.0
    return int(wanted) / 1e6
