"""The address of a listening socket, as a user writes it: ``PORT``, ``HOST:PORT`` or ``unix:PATH``."""

from __future__ import annotations

import ipaddress

from attrs import frozen

LOCALHOST = "127.0.0.1"
FRAMED_TCP = "tcp:"
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})


@frozen
class Address:
    """A TCP host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path or self.host in _LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """The address as a client writes it; a Unix socket has only a path."""
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def framed(self) -> str:
        """The address as a client of the framed protocol writes it."""
        return self.path or self.url.replace("http://", FRAMED_TCP, 1)


def parse_framed(text: str) -> Address:
    """Read where the framed protocol is served: ``tcp:127.0.0.1:8620``, or the path of a Unix socket.

    Raises:
        ValueError: it is no TCP address, or one that other machines can reach.
    """
    if not text.startswith(FRAMED_TCP):
        return Address(path=text)
    address = parse_address(text.removeprefix(FRAMED_TCP))
    if address.path or not address.is_loopback:
        raise ValueError(
            "an address of this machine alone, tcp:127.0.0.1:PORT or tcp:[::1]:PORT: from elsewhere the "
            "token would cross the network unencrypted; forward the port (ssh -L), or serve --http"
        )
    return address


def parse_address(text: str) -> Address:
    """Read ``8080``, ``127.0.0.1:8080``, ``[::1]:8080`` or ``unix:/run/uma.http``.

    Raises:
        ValueError: it is none of these; the message shows the forms.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path or "\0" in path:
            raise ValueError("an address: unix: needs the path of a socket after it")
        return Address(path=path)
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an address: an IPv6 host needs brackets, as in [::1]:8080")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ValueError("an address: PORT, HOST:PORT or unix:PATH, with a port of 1 to 65535")
    return Address(host or LOCALHOST, int(port))
