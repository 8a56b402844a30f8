"""For every frame that a client may send, no step on trio's thread does more work than is stated."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from meter_kit import Document, Meter
from net_kit import house
from trio.testing import MockClock

from uma_protocol import DEFAULT_MAX_FRAME_BYTES
from uma_protocol.scan import MAX_NODES

CALLS = 7 * MAX_NODES
"""Of one step: what is checked of each value of a frame."""

_UNITS = ["a", "word ", "é", "\U0001f600", '"', "\\", "\u2028", " ", "\n", "[],"]
_TEXTS = st.builds(
    lambda unit, n: unit * (n // len(unit)), st.sampled_from(_UNITS), st.integers(0, 1_000_000)
)
_MANY = [
    lambda n: [1] * n,
    lambda n: [[] for _ in range(n)],
    lambda n: ["text"] * n,
    lambda n: {f"n{i}": i for i in range(n)},
    lambda n: [{"role": "user", "content": "a"}] * (n // 3),
    lambda n: [{"name": f"t{i}", "parameters": {"type": "object"}} for i in range(n // 4)],
]
_LISTS = st.builds(lambda make, n: make(n), st.sampled_from(_MANY), st.integers(0, 5000))
_ANY = _TEXTS | _LISTS
_NAMES = (
    *("prompt", "messages", "tools", "schema", "choice", "grammar", "regex", "logit_bias", "stop"),
    *("metadata", "chat_template_kwargs", "stop_token_ids", "unknown", "session"),
)
_FRAMES = st.dictionaries(st.sampled_from(_NAMES), _ANY, max_size=3).map(Document)


async def _send(frames: list[dict[str, Any]], types: tuple[str, ...] = ("generate",)) -> Meter:
    """Send each on a connection of its own; return the work of the largest steps."""
    meter = Meter(others=("run_inline", "_send"))
    async with house(run_blocking=meter.run_blocking) as daemon:
        for frame in frames:
            for kind in types:
                document = {"type": kind, "id": "r", "prompt": "hi", "max_tokens": 3, **frame}
                if "messages" in frame:
                    del document["prompt"]
                data = json.dumps(document, ensure_ascii=False).encode()
                if len(data) > DEFAULT_MAX_FRAME_BYTES:
                    continue
                client = daemon.connect()
                with pytest.MonkeyPatch.context() as patched, meter.installed(patched):
                    await client.send_bytes(struct.pack("<I", len(data)) + data)
                    client.end_sending()
                    await client.rest()
                client.close()
    return meter


def _check(meter: Meter) -> None:
    assert meter.on_loop.calls <= CALLS, meter.where
    assert meter.on_loop.characters <= DEFAULT_MAX_FRAME_BYTES
    assert meter.in_helper.characters <= 65_542, meter.where


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(frame=_FRAMES)
def test_no_step_on_a_frame_is_larger_than_its_bound(frame: Document) -> None:
    """Whether the daemon takes it or not."""
    _check(trio.run(_send, [frame.value], clock=MockClock(autojump_threshold=0)))


@pytest.mark.parametrize(
    "kind", ["generate", "priority", "explain", "prefix", "metrics", "sessions"]
)
def test_no_step_on_what_nobody_knows_is_larger_than_its_bound(kind: str) -> None:
    """In any kind of request: as many values as a frame may have, or as long a text."""
    frames = [{"unknown": make(n)} for make in _MANY for n in (1000, 4000, 100_000)]
    frames += [{"unknown": unit * (900_000 // len(unit.encode()))} for unit in _UNITS]
    _check(trio.run(_send, frames, (kind,), clock=MockClock(autojump_threshold=0)))


def test_the_largest_chat_of_a_frame_is_checked_within_its_bound() -> None:
    """As many messages as a frame may have values for, and one of the longest texts."""
    few = [{"role": "user", "content": "a"}] * 1300
    long = [{"role": "user", "content": "ж" * 500_000}]
    schema = {"schema": {"enum": [*range(3900)]}}
    frames = [{"messages": few}, {"messages": long}, {"prompt": "\U0001f600" * 250_000}, schema]
    meter = trio.run(_send, frames, clock=MockClock(autojump_threshold=0))
    assert meter.on_loop.characters > 900_000
    _check(meter)
