"""Cases of the sections Events, Errors, A TCP port, and Time and sizes."""

from __future__ import annotations

from uma_protocol.connection import MAX_HELLO_BYTES, MAX_REFUSED_IN_A_ROW

from .cases_documents import CANARY
from .peer import Document, Server, Skip, case, check_refusal, expect, frame, generate, long, short

_UNKNOWN_TYPE = {"type": "teleport"}

FIELDS: dict[str, tuple[dict[str, type | tuple[type, ...]], dict[str, type | tuple[type, ...]]]] = {
    # event: fields that are always there, fields that may be absent
    "token": (
        {"id": str, "text": str, "token_id": int},
        {"logprobs": dict, "reasoning": str, "calls": list, "choice": int},
    ),
    "end": (
        {"id": str, "reason": str, "completion_tokens": int, "request": int},
        {"choice": int, "text": str, "code": str, "message": str, "reasoning": str, "calls": list},
    ),
    "eos": (
        {"id": str, "reason": str, "usage": dict, "timings": dict, "request": int},
        {
            "text": str,
            "code": str,
            "message": str,
            "metadata": dict,
            "reasoning": str,
            "calls": list,
        },
    ),
    "error": (
        {"code": str, "message": str, "fatal": bool, "retryable": bool},
        {"id": str, "retry_after_ms": int},
    ),
    "ok": ({}, {"id": str}),
    "prefix": ({"budget_bytes": int, "used_bytes": int}, {}),
    "sessions": ({"sessions": list}, {}),
    "explain": ({"requests": list}, {}),
    "metrics": ({"metrics": dict}, {}),
}
"""Fields of events and their types; those of administrative answers may be more."""


def check_fields(event: Document) -> None:
    """Check an event against the table of its kind."""
    kind = event["event"]
    always, sometimes = FIELDS[kind]
    for name, value in event.items():
        expect(value is not None, f"{name} of {kind} is null")
        wanted = {**always, **sometimes}.get(name)
        right = wanted is None or (
            isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
        )
        expect(right, f"{name} of {kind} is {short(value)}")
    missing = always.keys() - event.keys()
    expect(not missing, f"{kind} came without {', '.join(sorted(missing))}")


# --- 4. Events ---


@case("4.0.1", "the events of a request have the fields of the table, and no null")
def _(server: Server) -> None:
    answer = server.ask(metadata={"x": 1}, n=2)
    for event in (*answer.tokens, *answer.ends, answer.eos):
        check_fields(event)


@case("4.0.2", "administrative answers have the fields of the table, and no null")
def _(server: Server) -> None:
    for request in (
        {"type": "sessions"},
        {"type": "explain"},
        {"type": "prefix"},
        {"type": "metrics"},
    ):
        check_fields(server.connect(request).event(request["type"]))


@case("4.0.3", "an id is left out where an event concerns no request")
def _(server: Server) -> None:
    for request in ({"type": "sessions"}, {"type": "prefix"}, {"type": "metrics"}):
        event = server.connect(request).event(request["type"])
        expect("id" not in event, f"{request['type']} has the id {event.get('id')!r}")
    error = server.connect(_UNKNOWN_TYPE).event("error")
    check_fields(error)
    expect("id" not in error, f"error has the id {error.get('id')!r}")


@case("4.1.1", "without streaming the whole text is in eos")
def _(server: Server) -> None:
    streamed, whole = server.ask(), server.ask(stream=False)
    expect(not whole.tokens, "tokens were sent")
    expect(whole.eos.get("text") == streamed.text, f"{whole.text!r} is not {streamed.text!r}")


@case("4.1.2", "a stop string and what follows it are not sent")
def _(server: Server) -> None:
    text = server.ask(max_tokens=16).text
    middle = len(text) // 2
    stop = text[middle : middle + 3].strip("\ufffd")
    if not stop:
        raise Skip("the model writes too little text")
    stopped = server.ask(max_tokens=16, stop=[stop])
    expected = text[: text.index(stop)]
    expect(stopped.text == expected, f"the text is {stopped.text!r}, not {expected!r}")
    expect(stopped.eos["reason"] == "stop", f"the reason is {stopped.eos['reason']}")


@case("4.2.1", "logprobs come with each token if they were asked for")
def _(server: Server) -> None:
    for token in server.ask(logprobs=3).tokens:
        found = token["logprobs"]
        values = [value for _, _, value in found["top"]]
        expect(len(values) == 3, f"3 alternatives were asked for, {len(values)} came")
        expect(values == sorted(values, reverse=True), f"not most likely first: {values}")
        expect(found["logprob"] <= 0, f"a log probability is {found['logprob']}")
        same = [value for id_, _, value in found["top"] if id_ == token["token_id"]]
        expect(not same or abs(same[0] - found["logprob"]) < 1e-3, "top and logprob differ")


@case("4.2.2", "logprobs do not come otherwise")
def _(server: Server) -> None:
    expect(all("logprobs" not in token for token in server.ask().tokens), "they came")


@case("4.3.1", "at max_tokens the reason is length")
def _(server: Server) -> None:
    answer = server.ask(max_tokens=3, ignore_eos=True)
    expect(answer.eos["reason"] == "length", f"the reason is {answer.eos['reason']}")
    expect(len(answer.tokens) == 3, f"3 tokens were asked for, {len(answer.tokens)} came")


@case("4.3.2", "the reason is one of four")
def _(server: Server) -> None:
    reason = server.ask().eos["reason"]
    expect(reason in ("stop", "length", "cancelled", "error"), f"the reason is {reason!r}")


@case("4.4.1", "usage counts the tokens that were sent")
def _(server: Server) -> None:
    answer = server.ask(ignore_eos=True)
    usage = answer.eos["usage"]
    expect(usage["completion_tokens"] == len(answer.tokens), f"{usage} of {len(answer.tokens)}")
    expect(usage["prompt_tokens"] > 0, f"usage is {usage}")
    expect(0 <= usage["cached_tokens"] <= usage["prompt_tokens"], f"usage is {usage}")


@case("4.4.2", "timings are in order")
def _(server: Server) -> None:
    timings = server.ask().eos["timings"]
    expect(
        0 <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["total_ms"],
        f"timings are {timings}",
    )
    expect(timings["tokens_per_s"] > 0, f"timings are {timings}")


@case("4.4.3", "a handle is never used twice")
def _(server: Server) -> None:
    handles = [server.ask(max_tokens=1).eos["request"] for _ in range(4)]
    expect(len(set(handles)) == 4, f"the handles are {handles}")


@case("4.5.1", "nothing of a request follows its eos")
def _(server: Server) -> None:
    peer = server.connect(generate())
    peer.answer()
    for _ in range(3):
        peer.serves()


@case("4.5.2", "a connection gets only events of its own requests")
def _(server: Server) -> None:
    names = [f"own-{number}" for number in range(4)]
    peers = [server.connect(generate(name, prompt=f"The {name}")) for name in names]
    for peer, name in zip(peers, names, strict=True):
        answer = peer.answer(name)
        expect(not answer.others, f"{name} got {short(answer.others)}")


@case("4.7.1", "a refused request gets one fatal error with its id and no eos")
def _(server: Server) -> None:
    server.refuses(generate(max_tokens=2**31 - 1), "E_LIMIT_004", id_="a")


@case("4.8.1", "explain describes a request, without its text")
def _(server: Server) -> None:
    handle = server.ask(prompt=f"Say {CANARY}").eos["request"]
    event = server.connect({"type": "explain", "request": handle}).event("explain")
    expect([one["request"] for one in event["requests"]] == [handle], f"it is {short(event)}")
    expect(CANARY not in str(event), "it contains text of the prompt")


@case("4.8.2", "explain of a request that is not recorded is refused")
def _(server: Server) -> None:
    server.refuses({"type": "explain", "request": 2**63 - 1}, "E_PROTO_005", fatal=False)


@case("4.9.1", "nothing of a choice follows its end, and eos follows the last one")
def _(server: Server) -> None:
    peer = server.connect(generate(n=2, ignore_eos=True))
    ended: set[int] = set()
    while (event := peer.read()) is not None and event["event"] != "eos":
        choice = event.get("choice", 0)
        expect(choice not in ended, f"choice {choice} went on: {short(event)}")
        if event["event"] == "end":
            ended.add(choice)
    expect(ended == {0, 1}, f"eos came after the ends of {sorted(ended)}")
    eos = event or {}
    expect(not eos.get("text"), "eos has text")
    expect(eos["reason"] == "length", f"the reason is {eos['reason']}")
    expect(eos["usage"]["completion_tokens"] == 16, f"usage is {eos['usage']}")


@case("4.9.2", "the prompt is counted once, and with one choice there is no end")
def _(server: Server) -> None:
    one, two = server.ask(), server.ask(n=2)
    expect(not one.ends, "an end came")
    counts = [answer.eos["usage"]["prompt_tokens"] for answer in (one, two)]
    expect(counts[0] == counts[1], f"prompt_tokens are {counts}")


# --- 5. Errors ---


@case("5.1.1", "after a fatal error nothing is sent")
def _(server: Server) -> None:
    peer = server.connect(b"{", {"type": "sessions"}, generate())
    peer.refusal("E_PROTO_001", fatal=True)


@case("5.2.1", "a bad document is fatal when nothing runs")
def _(server: Server) -> None:
    server.refuses(b"{", "E_PROTO_001")
    server.refuses(generate(max_tokens=-1), "E_PROTO_003", id_="a")


@case("5.2.2", "a bad document beside a request costs nothing but its answer")
def _(server: Server) -> None:
    answer = server.connect(long(), b"{", {"type": "sessions", "tick": 1}).answer()
    expect(len(answer.others) == 2, f"two refusals were expected, not {short(answer.others)}")
    check_refusal(answer.others[0], "E_PROTO_001", fatal=False)
    check_refusal(answer.others[1], "E_PROTO_003", fatal=False)
    expect(answer.eos["reason"] == "length", f"the request ended with {short(answer.eos)}")


@case("5.3.1", "sixteen refusals in a row end the connection")
def _(server: Server) -> None:
    peer = server.connect(*[_UNKNOWN_TYPE] * (MAX_REFUSED_IN_A_ROW + 2))
    for _ in range(MAX_REFUSED_IN_A_ROW - 1):
        peer.refusal("E_PROTO_007", fatal=False)
    peer.refusal("E_PROTO_007", fatal=True)


@case("5.3.2", "a valid document resets the count")
def _(server: Server) -> None:
    peer = server.connect()
    for _ in range(2):
        peer.send(*[_UNKNOWN_TYPE] * (MAX_REFUSED_IN_A_ROW - 1))
        for _ in range(MAX_REFUSED_IN_A_ROW - 1):
            peer.refusal("E_PROTO_007", fatal=False)
        peer.serves()


@case("5.4.1", "the reason can be read although the client still writes")
def _(server: Server) -> None:
    peer = server.connect()
    peer.write(bytes(4) + b"x" * (1 << 19))
    peer.refusal("E_PROTO_002", fatal=True)


# --- 6. A TCP port ---


def _tcp(server: Server) -> None:
    if not server.is_tcp:
        raise Skip("for a server on a TCP port")


@case("6.1.1", "a request may follow hello in the same write")
def _(server: Server) -> None:
    _tcp(server)
    server.ask()


@case("6.2.1", "nothing is accepted before hello")
def _(server: Server) -> None:
    _tcp(server)
    peer = server.dial()
    peer.send(generate())
    peer.refusal("E_AUTH_003", fatal=True, id_="a")


@case("6.2.2", "a wrong token ends the connection")
def _(server: Server) -> None:
    _tcp(server)
    peer = server.dial()
    peer.send({"type": "hello", "token": "wrong"}, generate())
    peer.refusal("E_AUTH_003", fatal=True)


@case("6.2.3", "the frame of hello is limited")
def _(server: Server) -> None:
    _tcp(server)
    peer = server.dial()
    peer.write((MAX_HELLO_BYTES + 1).to_bytes(4, "little"))
    peer.refusal("E_PROTO_002", fatal=True)


@case("6.3.1", "a client has five seconds for hello", slow=5)
def _(server: Server) -> None:
    _tcp(server)
    server.dial().refusal("E_PROTO_006", fatal=True)


@case("6.4.1", "on a Unix socket hello is accepted and ignored")
def _(server: Server) -> None:
    if server.is_tcp:
        raise Skip("for a server on a Unix socket")
    server.connect({"type": "hello", "token": "any"}, generate()).answer()


@case("6.8.1", "the end of the stream ends the connection")
def _(server: Server) -> None:
    _tcp(server)
    peer = server.connect(long())
    peer.end()
    while peer.read() is not None:
        pass


# --- 7. Time and sizes ---


@case("7.0.1", "a prompt above the limit is refused with its id")
def _(server: Server) -> None:
    server.refuses(generate(prompt="x" * (64 * 1024 + 1)), "E_LIMIT_001", id_="a")


@case("7.0.2", "a whole frame has to arrive within ten seconds", slow=10)
def _(server: Server) -> None:
    peer = server.connect()
    peer.write(frame(generate())[:6])
    peer.refusal("E_PROTO_006", fatal=True)
