"""What every connection is handed: the bounds of the socket side, the service, the log."""

from __future__ import annotations

from attrs import frozen

from uma_trio.observe.log import Log
from uma_trio.service.ask import Door
from uma_trio.service.service import Service
from uma_trio.words import MIB


@frozen(kw_only=True)
class Settings:
    """Every bound of the socket side, in one place. Times in seconds."""

    max_prompt_bytes: int = 65_536
    max_sessions: int = 32
    idle_timeout_s: float = 300.0
    # For operators, where all sessions are held: `metrics`, `sessions`, `explain`, `prefix` and
    # `priority` are one question each.
    operator_places: int = 2
    operator_idle_s: float = 0.5
    refused_retry_s: float = 1.0
    frame_timeout_s: float = 10.0
    # Clients of a TCP port that have not shown the token yet: how long, and how many at once.
    hello_timeout_s: float = 5.0
    most_unknown: int = 64
    stall_timeout_s: float = 30.0
    linger_s: float = 1.0
    linger_bytes: int = MIB
    # A reader that stops gets what fits in here besides its credit: an 80-byte frame takes about
    # 768 bytes of it.
    send_buffer_bytes: int = 8192
    # Answers to admin requests that may wait for a client that does not read them.
    backlog_bytes: int = 65_536


@frozen(kw_only=True, eq=False)
class Shared:
    """What all connections have in common."""

    settings: Settings
    service: Service
    log: Log

    @property
    def door(self) -> Door:
        """The limits of every request from the socket."""
        return Door(max_prompt_bytes=self.settings.max_prompt_bytes)
