"""What a frame costs: microseconds to encode and decode a token and a request.

    python -m benches.frames                a few seconds

The token is the daemon's hot path (one per stream and tick) and its reader's; a request is paid
once. Each figure is the best of several runs, since everything that disturbs only adds.
"""

from __future__ import annotations

import timeit
from typing import TYPE_CHECKING

from benches import report
from uma_protocol import (
    Generate,
    Message,
    Role,
    Token,
    decode_event,
    decode_request,
    encode_event,
    encode_request,
    frame,
)
from uma_protocol.testing import ConnectionPair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOKEN = Token("quickstart-1", " hello", 1234)
ASK = Generate(
    "quickstart-1",
    app="editor",
    max_tokens=20,
    temperature=0.7,
    seed=1,
    messages=(Message("system", "Be brief."), Message("user", "Hello, UMA Serve! " * 20)),
)


def microseconds(call: Callable[[], object], number: int) -> float:
    """The best time of one call over several runs."""
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def show() -> None:
    """Print one line per figure."""
    token = encode_event(TOKEN)
    request = encode_request(ASK)
    pair = ConnectionPair()
    pair.send(Role.CLIENT, ASK)
    pair.server.prompt_done()
    framed = pair.server.send(TOKEN)

    def receive() -> None:
        pair.client.receive_data(framed)
        pair.client.next_event()

    figures = [
        ("token: encode, with header", lambda: frame(encode_event(TOKEN)), 100_000),
        ("token: decode", lambda: decode_event(token), 100_000),
        ("token: Connection.send", lambda: pair.server.send(TOKEN), 50_000),
        ("token: receive_data + next_event", receive, 50_000),
        ("generate: encode, with header", lambda: frame(encode_request(ASK)), 10_000),
        ("generate: decode", lambda: decode_request(request), 10_000),
    ]
    for label, call, number in figures:
        print(f"{label:<34} {microseconds(call, number):7.2f} us")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; there is nothing to choose but ``--help``."""
    report.parser("frames", __doc__).parse_args(argv)
    show()


if __name__ == "__main__":
    main()
