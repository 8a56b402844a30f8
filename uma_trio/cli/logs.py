"""`uma-trio logs`: what the daemon's service logged, and what comes."""

from __future__ import annotations

from uma_trio.cli.service import service


def logs() -> int:
    """Show the log of the service. A daemon that was started by hand logs to its terminal."""
    return service("logs")
