"""Settings of the specification that have one value: accepted with that value, refused otherwise.

A command line or a file written for another implementation works as long as it asks for what this
daemon does.
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
            f"omit it or use {self.accepts[0]}"
        )
        raise ConfigError(message)


RESERVED: tuple[Reserved, ...] = (
    Reserved(
        "--kv-pack",
        ("default",),
        "llama.cpp stores K by cell, and V by cell or across them; it has no layout by heads",
        ("kv_pack",),
    ),
    Reserved("--ipc", ("uds",), "the Unix domain socket is the only transport"),
    Reserved(None, ("64",), "the listener's backlog is fixed", ("ipc.backlog",)),
    Reserved(
        None,
        ("4",),
        "the policy derives the batch size from measured times",
        ("scheduler.max_merge",),
    ),
    Reserved(
        None,
        ("32",),
        "the policy derives the batch size from measured times",
        ("scheduler.start_target_tokens",),
    ),
    Reserved(
        None,
        ("1000",),
        "the scorecard is updated every second",
        ("metrics.tick_interval_ms",),
    ),
    Reserved(
        None,
        ("1",),
        "qos.interactive.priority is relative to this value",
        ("qos.background.priority",),
    ),
    Reserved(
        None,
        ("on", "true"),
        "requests always join between two tokens",
        ("scheduler.preempt_at_token",),
    ),
)


def _same_number(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return False
