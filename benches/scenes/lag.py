"""How long the worst bodies hold a daemon's event loop up, beside a stream. Four minutes.

    python -m benches lag --no-peers

Every body has three rounds, one behind the other: nothing, one process that spins, the body. Bodies are made
and sent by a process of their own, as the stream is read and timed by this one. *lag* is the longest lag of the
daemon's event loop in the round: exact if it is the longest since the start, otherwise the upper edge of a step
of `loop_lag_ms` (half a millisecond below 10). *gap* is the longest time between two parts of the stream, *ratio*
that gap over the gap beside the spinning process. Figures are medians of five. Targets: a lag of at most
5 ms, a ratio of at most 1.3.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benches import beside, contest, servers
from benches.clients import NotServed
from benches.contest import Medians, Row, System
from benches.driver import Comparison, Here, Table, scene

LAG_MS, RATIO = 5.0, 1.3  # the targets
_ROUND_S = 1.0


def _chat(n: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}] * n, "max_tokens": 1}


def _tools(n: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(30)}
    parameters = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": f"t{i}", "parameters": parameters}}
        for i in range(n)
    ]
    return {**_chat(1), "tools": tools}


BODIES: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "2 MB to tokenise": ("/tokenize", lambda: {"content": "ab " * 690_000}),
    "256 KB with pieces": ("/tokenize", lambda: {"content": "ab " * 87_000, "with_pieces": True}),
    "32,000 ids": ("/detokenize", lambda: {"tokens": [300] * 32_000}),
    "8 MB of ids": ("/v1/completions", lambda: b'{"prompt":[%b1]}' % (b"5," * 4_000_000)),
    "16,000 lists": ("/v1/completions", lambda: {"prompt": "a", "max_tokens": 1, "x": [[]] * 16_000}),
    "30,000 names": (
        "/v1/completions",
        lambda: {"prompt": "a", "max_tokens": 1, **{f"x{n}": 1 for n in range(30_000)}},
    ),
    "2 MB of emoji": ("/v1/completions", lambda: {"prompt": "\U0001f600" * 500_000}),
    "8,192 messages": ("/v1/chat/completions", lambda: _chat(8192)),
    "400 tools": ("/v1/chat/completions", lambda: _tools(400)),
    "a schema of 30,000 values": (
        "/v1/chat/completions",
        lambda: {**_chat(1), "json_schema": {"enum": [*range(30_000)]}},
    ),
    "1,024 biases of texts": (
        "/completion",
        lambda: {"prompt": "a", "n_predict": 1, "logit_bias": [[f"word{n}" * 20, 1] for n in range(1024)]},
    ),
}  # fmt: skip


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bodies", nargs="+", default=[*BODIES], metavar="NAME", choices=BODIES)


@scene(_arguments)
def lag(given: argparse.Namespace, here: Here) -> Comparison:
    """Return what is measured: one daemon, with a case for each body."""
    setup = servers.Setup(here.model, here.threads, n_ctx=4096, slots=4)
    compared = [System("uma-trio", "", lambda _seed: _measure(setup, given.bodies))]
    columns = (("lag ms", "lag_ms", 1), ("quiet lag ms", "quiet_lag_ms", 1), ("gap ms", "gap_ms", 1),
               ("spinner's gap ms", "spin_gap_ms", 1), ("ratio", "ratio", 2))  # fmt: skip
    return Comparison(
        compared,
        seconds=10 * len(given.bodies),
        tables=[Table("Beside each body", columns)],
        repetitions=5,
        verdicts=_verdicts,
    )


def _verdicts(medians: Medians) -> Iterable[str]:
    for figure, target in (("lag_ms", LAG_MS), ("ratio", RATIO)):
        found = [value for s in medians.systems if (value := medians(s, figure)) is not None]
        yield contest.verdict(f"worst {figure}", max(found, default=None), target, at_most=True)


def _measure(setup: servers.Setup, names: list[str]) -> list[Row]:
    port = servers.free_port()
    with (
        servers.ours(setup, "--http", str(port)),
        beside.child(__name__, str(port), *names) as sender,
        beside.stream(port) as stream,
    ):
        return [_case(name, stream, sender) for name in names]


def _case(name: str, stream: beside.Stream, sender: Callable[[str], str]) -> Row:
    """Return the figures of one body, with those of the rounds before it."""
    quiet = beside.felt(stream, _ROUND_S)
    with beside.spinning():
        spin = beside.felt(stream, _ROUND_S)
    found = beside.felt(stream, _ROUND_S, lambda: _send(sender, name))
    return {"case": name, "lag_ms": found.lag_ms, "quiet_lag_ms": quiet.lag_ms, "gap_ms": found.gap_ms,
            "spin_gap_ms": spin.gap_ms, "ratio": beside.over(found.gap_ms, spin.gap_ms)}  # fmt: skip


def _send(sender: Callable[[str], str], name: str) -> None:
    status = sender(name)
    if not status.isdigit() or int(status) >= 500:
        raise NotServed(f"{name} was answered with {status or 'nothing'}")


def _serve(port: int, names: list[str]) -> None:
    """Make the bodies, then send each that is named on the input; say the status of its answer."""
    made = {}
    for name in names:
        path, make = BODIES[name]
        body = make()
        made[name] = (path, body if isinstance(body, bytes) else json.dumps(body).encode())
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            status, _ = beside.ask(port, "POST", *made[line.rstrip("\n")])
        except (OSError, http.client.HTTPException) as error:
            print(type(error).__name__, flush=True)
        else:
            print(status, flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
