"""What the daemon tells the program that supervises it, over sd_notify(3)'s datagrams."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping
from typing import Final

# A model is loaded in parts; between two of them no more than this may pass.
_LOADING_US: Final = 120_000_000


class Supervisor:
    """Tells a supervisor, such as systemd, what the daemon does. Without one it does nothing.

    Nothing here blocks or raises: a supervisor that does not listen is no reason to stop serving.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else 0.0

    @classmethod
    def of(cls, env: MutableMapping[str, str], pid: int) -> Supervisor:
        """Return the one that `env` names, and take its variables out, so that no child uses them."""
        address = env.pop("NOTIFY_SOCKET", "")
        return cls(address, _watchdog_s(env, pid))

    def loading(self, share: float) -> None:
        """Say how much of the model is loaded, and ask for more time."""
        self._notify(STATUS=f"loading the model, {share:.0%}", EXTEND_TIMEOUT_USEC=str(_LOADING_US))

    def measuring(self, share: float) -> None:
        """Say how far the machine is measured, and ask for more time."""
        self._notify(
            STATUS=f"measuring the machine, {share:.0%}", EXTEND_TIMEOUT_USEC=str(_LOADING_US)
        )

    def ready(self, what: str) -> None:
        """Say that clients can connect, and what they get."""
        self._notify(READY="1", STATUS=what)

    def alive(self) -> None:
        """Say that the engine computes, or that there is nothing to compute."""
        self._notify(WATCHDOG="1")

    def stopping(self, drain_s: float) -> None:
        """Say that the daemon drains, and how long that may take."""
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
    """Return how often the supervisor wants a sign of life (sd_watchdog_enabled(3)); 0 is never."""
    wanted, of = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", str(pid))
    if not wanted.isdecimal() or of != str(pid):
        return 0.0
    return int(wanted) / 1e6
