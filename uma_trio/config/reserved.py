"""What later versions will bring: accepted at its one value, and refused otherwise.

So a command line or a file that was written for a later version works as long as it asks for what
is there.
"""

from __future__ import annotations

from attrs import frozen

from uma_trio.config.option import ConfigError, as_written


@frozen
class Reserved:
    """An option that has one value: `accepts` lists its spellings, `because` says why."""

    flag: str | None
    accepts: tuple[str, ...]
    because: str
    keys: tuple[str, ...] = ()

    def check(self, raw: object, source: str) -> None:
        """Raise unless `raw` is the default."""
        text = str(raw).strip().lower()
        if text in self.accepts or _same_number(text, self.accepts[0]):
            return
        message = (
            f"{source}: {as_written(raw)} is not available: {self.because}; "
            f"leave it out or use {self.accepts[0]}"
        )
        raise ConfigError(message)


RESERVED: tuple[Reserved, ...] = (
    Reserved(
        "--kv-pack",
        ("default",),
        "llama.cpp stores K by cell, and V by cell or across them; it has no layout by heads",
        ("kv_pack",),
    ),
    Reserved("--ipc", ("uds",), "other transports come later"),
    Reserved(None, ("64",), "the listener's backlog is fixed", ("ipc.backlog",)),
    Reserved(
        None, ("4",), "the measured staircase says how much to merge", ("scheduler.max_merge",)
    ),
    Reserved(
        None, ("32",), "ticks soon show how many they hold", ("scheduler.start_target_tokens",)
    ),
    Reserved(
        None,
        ("1000",),
        "the scorecard is brought up to date each second",
        ("metrics.tick_interval_ms",),
    ),
    Reserved(
        None, ("1",), "qos.interactive.priority is relative to it", ("qos.background.priority",)
    ),
    Reserved(
        None, ("on", "true"), "requests always join at a token", ("scheduler.preempt_at_token",)
    ),
)


def _same_number(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return False
