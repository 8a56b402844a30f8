"""Cases of the section Requests."""

from __future__ import annotations

import base64
import json
import re
import struct
from typing import Any

from .documents import REQUESTS
from .peer import Answer, Document, Server, Skip, case, check_refusal, expect, generate, long, short

BUSY, UNKNOWN = "E_PROTO_004", "E_PROTO_005"


def _beside(server: Server, document: Document, kind: str) -> Document:
    """Send a document in the same write as a long request, and return the event that answers it.

    A server may take its time for the answer: it may come behind the `eos`.
    """
    peer = server.connect(long(), document)
    answer = peer.answer()
    expect(answer.eos["reason"] == "length", f"the request ended with {short(answer.eos)}")
    expect(len(answer.others) < 2, f"expected one more answer, not {short(answer.others)}")
    return answer.others[0] if answer.others else peer.event(kind)


# --- 3. the text before the rules ---


@case("3.0.1", "a request without type is generate")
def _(server: Server) -> None:
    server.connect(generate()).answer()
    server.connect({"type": "generate", **generate()}).answer()


@case("3.0.2", "cancel may be spelled as an event")
def _(server: Server) -> None:
    peer = server.connect(long(), {"event": "cancel", "id": "a"})
    expect(peer.answer().eos["reason"] == "cancelled", "the request was not cancelled")


@case("3.0.3", "metrics may be spelled as an event")
def _(server: Server) -> None:
    server.connect({"event": "metrics"}).event("metrics")


@case("3.0.4", "an unknown type is refused and never fatal")
def _(server: Server) -> None:
    peer = server.connect({"type": "teleport"})
    peer.refusal("E_PROTO_007", fatal=False)
    peer.serves()


VALUES: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    # field of generate: values at its bounds, values beyond them
    "id": (("x" * 128,), ("", "x" * 129, "a\x07", 1)),
    "session": (("x" * 256,), ("", "x" * 257, "a\n")),
    "cache": (("private",), ("",)),
    "app": (("editor",), ("x" * 257,)),
    "model": ((), ("", "x" * 257)),
    "priority": (("interactive", "background"), ("urgent",)),
    "max_tokens": ((1,), (0, 2**31, "5")),
    "temperature": ((0, 100, 0.5), (-0.1, 100.1, "0")),
    "default_temperature": ((0, 100), (-0.1, 100.1)),
    "top_p": ((0, 1), (-0.1, 1.1)),
    "top_k": ((-1, 2**31 - 1), (-2, 2**31)),
    "min_p": ((0, 1), (-0.1, 1.1)),
    "presence_penalty": ((-2, 2), (-2.1, 2.1)),
    "frequency_penalty": ((-2, 2), (-2.1, 2.1)),
    "repeat_penalty": ((0.01, 100), (0, 100.1)),
    "repeat_last_n": ((-1, 64), (-2, 2**31)),
    "seed": ((-(2**63) + 1, 2**63 - 1), (-(2**63), 2**63, 0.5)),
    "min_tokens": ((0, 1), (-1, 2**31)),
    "stop_token_ids": (([], [1] * 64), ([1] * 65, [-1], ["1"])),
    "ignore_eos": ((True, False), (0,)),
    "speculation": (("off", "free", "auto"), ("on",)),
    "pace": (("smooth", "asap"), ("fast",)),
    "awaits": (("tokens", "answer"), ("patience",)),
    "lora": (([],), ([{"name": ""}], [{"scale": 1}] * 65)),
    "logit_bias": (({}, {"1": -100}), ({"x": 1}, {"1": 101}, {"-1": 0})),
    "n": ((1,), (0, 129)),
    "stop": (([], ["x" * 256]), ([""], ["x" * 257], ["x"] * 129)),
    "logprobs": ((0,), (-1, 21)),
    "schema": ((), ([], "object", {"x": "y" * 65536})),
    "regex": ((), ("", "x" * 65537)),
    "choice": ((), ([], [""], ["x"] * 257)),
    "grammar": ((), ("", "x" * 16385)),
    "stream": ((True, False), ("true",)),
    "progress": ((True, False), (1,)),
    "continue_final_message": ((False,), (0,)),
    "chat_template_kwargs": ((), ([], {"x": "y" * 4096})),
    "reasoning_effort": ((), ("huge",)),
    "reasoning_budget": ((), (-1, 2**31)),
    "tools": ((), ("look", [{"description": "no name"}])),
    "tool_choice": ((), ("any",)),
    "allowed_tools": ((), ("look", [1])),
    "parallel_tool_calls": ((), (0,)),
    "slo": (({"target_ttft_ms": 1, "target_tbt_ms": 3600000},), ({"target_ttft_ms": 0}, {"x": 1})),
    "metadata": (({},), ([], {"x": "y" * 4096})),
    "prompt": (("x",), ("", ["x"])),
    "messages": ((), ([], "hi", [{"role": "user"}], [{"role": "wizard", "content": ""}])),
}
"""For each field of `generate`: values that a server accepts, and values that it refuses."""

OTHERS: dict[str, tuple[Document, dict[str, tuple[object, ...]]]] = {
    # type: a valid request, and values that are refused
    "embed": (
        {"id": "a", "input": ["x"]},
        {
            "id": ("",),
            "model": ("",),
            "progress": (1,),
            "dimensions": (0, 2**31),
            "truncate": (1,),
            "input": ([], "x", [""]),
        },
    ),
    "rerank": (
        {"id": "a", "query": "x", "documents": ["y"]},
        {
            "id": ("",),
            "model": ("",),
            "progress": (1,),
            "top_n": (0,),
            "truncate": (1,),
            "query": ("",),
            "documents": ([], [""]),
        },
    ),
    "hello": ({"token": "x"}, {"token": ("", "x" * 257)}),
    "cancel": ({"id": "a"}, {"id": ("",), "request": (0, "1")}),
    "priority": (
        {"id": "a", "priority": "background"},
        {"id": ("",), "request": (0,), "priority": ("urgent",)},
    ),
    "sessions": ({}, {"ticks": (-1, 1001)}),
    "explain": ({}, {"request": (0,), "ticks": (-1, 1001)}),
    "prefix": ({}, {"action": ("burn",), "session": ("",), "seconds": (-1, 86401)}),
    "load": ({"model": "x"}, {"model": ("",)}),
    "unload": ({"model": "x"}, {"model": ("",)}),
    "metrics": ({}, {"interval_ms": (9, 3600001)}),
}
"""For each other type of request: a valid one, and for each of its fields values that a server refuses."""


@case("3.0.5", "each field of generate takes the values at its bounds")
def _(server: Server) -> None:
    for name, (good, _) in VALUES.items():
        for value in good:
            fields: dict[str, Any] = {"max_tokens": 1, name: value}
            id_ = str(fields.pop("id", "a"))
            answer = server.connect({**generate(id_), **fields})
            event = answer.read()
            expect(
                event is not None and event["event"] != "error",
                f"{name} {short(value)} was refused: {short(event)}",
            )
            answer.close()


@case("3.0.6", "each field of generate is refused beyond its bounds")
def _(server: Server) -> None:
    for name, (_, bad) in VALUES.items():
        for value in bad:
            _refuses(server, {**generate(max_tokens=1), name: value}, name, value)


@case("3.0.7", "each field of the other types is refused beyond its bounds")
def _(server: Server) -> None:
    for kind, (valid, fields) in OTHERS.items():
        for name, bad in fields.items():
            for value in bad:
                _refuses(server, {"type": kind, **valid, name: value}, f"{kind} {name}", value)


@case("3.0.8", "a field that is required is missed")
def _(server: Server) -> None:
    for kind, names in {
        "generate": ("id",),
        "embed": ("id", "input"),
        "rerank": ("id", "query", "documents"),
        "priority": ("priority",),
        "load": ("model",),
        "unload": ("model",),
    }.items():
        for name in names:
            document: Document = {
                "type": kind,
                **(generate() if kind == "generate" else OTHERS[kind][0]),
            }
            del document[name]
            _refuses(server, document, f"{kind} without {name}", None)


def _refuses(server: Server, document: Document, what: str, value: object) -> None:
    event = server.connect(document).event("error")
    expect(
        event.get("code") == "E_PROTO_003" and event.get("fatal") is True,
        f"{what} {short(value)}: expected a fatal E_PROTO_003, not {short(event)}",
    )


_ABOUT_OTHERS = ("hello", "cancel", "priority", "load", "unload")
"""Types whose documents could change what a server does for others."""


@case("3.0.9", "a document of each type with any of its fields is read")
def _(server: Server) -> None:
    for payload in REQUESTS:
        if json.loads(payload)["type"] in _ABOUT_OTHERS:
            continue
        peer = server.connect(payload)
        event = peer.read()
        peer.close()  # or it would go on, in a slot of the server
        refused = event is not None and event.get("code") in (
            "E_PROTO_001",
            "E_PROTO_003",
            "E_PROTO_007",
        )
        expect(event is not None and not refused, f"{payload!r}: {short(event)}")


# --- 3. the rules ---


@case("3.1.1", "a second request is refused and the first continues")
def _(server: Server) -> None:
    check_refusal(_beside(server, generate("b"), "error"), BUSY, fatal=False, id_="b")


@case("3.1.2", "embed and rerank are requests like generate")
def _(server: Server) -> None:
    embed = {"type": "embed", "id": "b", "input": ["x"]}
    check_refusal(_beside(server, embed, "error"), BUSY, fatal=False, id_="b")
    rerank = {"type": "rerank", "id": "b", "query": "x", "documents": ["y"]}
    check_refusal(_beside(server, rerank, "error"), BUSY, fatal=False, id_="b")


@case("3.2.1", "a cancel ends the running request, and the connection goes on")
def _(server: Server) -> None:
    peer = server.connect(long(), {"type": "cancel", "id": "a"})
    expect(peer.answer().eos["reason"] == "cancelled", "the reason is not cancelled")
    peer.send(generate("b"))
    peer.answer("b")


@case("3.2.2", "a cancel of an unknown id cancels nothing")
def _(server: Server) -> None:
    other = _beside(server, {"type": "cancel", "id": "zz"}, "error")
    check_refusal(other, UNKNOWN, fatal=False, id_="zz")


@case("3.2.3", "a cancel of an ended request cancels nothing")
def _(server: Server) -> None:
    peer = server.connect(generate())
    peer.answer()
    peer.send({"type": "cancel", "id": "a"})
    peer.refusal(UNKNOWN, fatal=False, id_="a")
    peer.serves()


@case("3.2.4", "a cancel cannot name the request of another connection")
def _(server: Server) -> None:
    first = server.connect(long("mine"))
    second = server.connect({"type": "cancel", "id": "mine"})
    second.refusal(UNKNOWN, fatal=False, id_="mine")
    expect(first.answer("mine").eos["reason"] == "length", "it was cancelled")


@case("3.2.5", "an id may be used again")
def _(server: Server) -> None:
    peer = server.connect()
    for _ in range(2):
        peer.send(generate("again"))
        peer.answer("again")


@case("3.2.6", "a handle of an ended request cancels nothing")
def _(server: Server) -> None:
    handle = server.ask().eos["request"]
    expect(type(handle) is int and handle >= 1, f"the handle is {handle!r}")
    server.refuses({"type": "cancel", "request": handle}, UNKNOWN, fatal=False)


def _answers(server: Server, document: Document, kind: str) -> None:
    other = _beside(server, document, kind)
    expect(other["event"] == kind, f"expected {kind}, not {short(other)}")


@case("3.3.1", "sessions is answered while a request runs")
def _(server: Server) -> None:
    _answers(server, {"type": "sessions"}, "sessions")


@case("3.3.2", "explain is answered while a request runs")
def _(server: Server) -> None:
    _answers(server, {"type": "explain"}, "explain")


@case("3.3.3", "prefix is answered while a request runs")
def _(server: Server) -> None:
    _answers(server, {"type": "prefix"}, "prefix")


@case("3.3.4", "metrics is answered while a request runs")
def _(server: Server) -> None:
    _answers(server, {"type": "metrics"}, "metrics")


@case("3.3.5", "priority is carried out while a request runs")
def _(server: Server) -> None:
    _answers(server, {"type": "priority", "id": "a", "priority": "background"}, "ok")


@case("3.4.1", "metrics is answered once, then the connection closes")
def _(server: Server) -> None:
    peer = server.connect({"type": "metrics"})
    metrics = peer.event("metrics").get("metrics")
    expect(isinstance(metrics, dict) and metrics, f"the metrics are {short(metrics)}")
    peer.closed()


@case("3.4.2", "metrics with an interval repeats")
def _(server: Server) -> None:
    peer = server.connect({"type": "metrics", "interval_ms": 10})
    for _ in range(3):
        peer.event("metrics")


@case("3.4.3", "repeated metrics are refused beside a running request")
def _(server: Server) -> None:
    other = _beside(server, {"type": "metrics", "interval_ms": 10}, "error")
    check_refusal(other, "E_PROTO_007", fatal=False)


@case("3.4.4", "metrics beside a running request does not close the connection")
def _(server: Server) -> None:
    peer = server.connect(long(), {"type": "metrics"})
    if not peer.answer().others:
        peer.event("metrics")
    peer.serves()


@case("3.6.1", "a bias of -100 forbids a token, one of 100 forces it")
def _(server: Server) -> None:
    first = server.ask(max_tokens=1).tokens[0]["token_id"]
    second = server.ask(max_tokens=1, logit_bias={str(first): -100}).tokens[0]["token_id"]
    expect(first != second, f"token {first} came in spite of its bias")
    forced = server.ask(max_tokens=1, logit_bias={str(second): 100}).tokens[0]["token_id"]
    expect(forced == second, f"token {second} did not come, but {forced}")


@case("3.6.2", "a token that would end the answer is masked until min_tokens")
def _(server: Server) -> None:
    first = server.ask(max_tokens=1).tokens[0]["token_id"]
    ended = server.ask(stop_token_ids=[first])
    expect(ended.eos["reason"] == "stop", f"token {first} did not end it: {short(ended.eos)}")
    expect(ended.text == "", "the token that ends the answer was sent")
    longer = server.ask(stop_token_ids=[first], min_tokens=3)
    expect(longer.eos["usage"]["completion_tokens"] >= 3, "the answer ended before min_tokens")


@case("3.6.3", "the same seed gives the same draws, and top_k 1 the most likely token")
def _(server: Server) -> None:
    fields = {"temperature": 1.0, "seed": 7, "max_tokens": 4}
    one, two = (server.ask(**fields) for _ in range(2))
    expect(one.text == two.text, "one seed gave two answers")
    greedy = server.ask(max_tokens=1).tokens[0]["token_id"]
    drawn = server.ask(max_tokens=1, temperature=5.0, top_k=1).tokens[0]["token_id"]
    expect(greedy == drawn, f"top_k 1 gave {drawn}, not {greedy}")


@case("3.7.1", "fields of a chat are refused beside a prompt")
def _(server: Server) -> None:
    for fields in (
        {"continue_final_message": True},
        {"chat_template_kwargs": {"x": 1}},
        {"reasoning_effort": "low"},
    ):
        server.refuses(generate(**fields), "E_PROTO_003", id_="a")


@case("3.7.2", "logprobs is refused without streaming")
def _(server: Server) -> None:
    server.refuses(generate(logprobs=1, stream=False), "E_PROTO_003", id_="a")


@case("3.7.3", "exactly one of prompt and messages is given")
def _(server: Server) -> None:
    server.refuses(generate(prompt=None), "E_PROTO_003", id_="a")
    both = generate(messages=[{"role": "user", "content": "hi"}])
    server.refuses(both, "E_PROTO_003", id_="a")


def _constrained(server: Server, **fields: Any) -> str:
    peer = server.connect(generate(max_tokens=48, **fields))
    event = peer.read()
    if event is not None and event.get("code") == "E_MODEL_002":
        raise Skip("this server does not constrain answers")
    expect(event is not None and event["event"] == "token", f"expected token, not {short(event)}")
    answer = peer.answer()
    expect(answer.eos["reason"] == "stop", f"it ended with {short(answer.eos)}")
    return str((event or {})["text"]) + answer.text


@case("3.8.1", "the answer is one of choice")
def _(server: Server) -> None:
    text = _constrained(server, choice=["red", "green"])
    expect(text in ("red", "green"), f"the answer is {text!r}")


@case("3.8.2", "the answer is an instance of schema")
def _(server: Server) -> None:
    text = _constrained(server, schema={"enum": ["red", 7, True]})
    expect(json.loads(text) in ("red", 7, True), f"the answer is {text!r}")


@case("3.8.3", "the answer matches regex")
def _(server: Server) -> None:
    text = _constrained(server, regex="[0-9]{2}-[a-c]")
    expect(re.fullmatch("[0-9]{2}-[a-c]", text), f"the answer is {text!r}")


@case("3.8.4", "a request has one constraint")
def _(server: Server) -> None:
    server.refuses(generate(choice=["x"], regex="x"), "E_PROTO_003", id_="a")


@case("3.8.5", "what cannot be enforced is refused")
def _(server: Server) -> None:
    event = server.connect(generate(regex="(")).event("error")
    if event.get("code") == "E_MODEL_002":
        raise Skip("this server does not constrain answers")
    check_refusal(event, "E_PROTO_003", fatal=True, id_="a")


@case("3.10.1", "a client may close its sending half after its request")
def _(server: Server) -> None:
    if server.is_tcp:
        raise Skip("over TCP the end of the stream ends the request (rule 6.8)")
    peer = server.connect(generate())
    peer.end()
    expect(peer.answer().eos["reason"] in ("stop", "length"), "the request did not run to its end")
    peer.closed()


@case("3.11.1", "n choices are numbered from 0 and each has its end")
def _(server: Server) -> None:
    answer = server.ask(n=2)
    numbers = sorted(end.get("choice", 0) for end in answer.ends)
    expect(numbers == [0, 1], f"the ends are of the choices {numbers}")
    expect({token.get("choice", 0) for token in answer.tokens} == {0, 1}, "a choice has no token")


@case("3.11.2", "cancel ends all choices")
def _(server: Server) -> None:
    answer = server.connect(long(n=2), {"type": "cancel", "id": "a"}).answer()
    expect(answer.eos["reason"] == "cancelled", f"it ended with {short(answer.eos)}")


def _encoded(server: Server, document: Document) -> Answer:
    peer = server.connect(document)
    event = peer.read()
    if event is not None and event["event"] == "error":
        check_refusal(event, "E_MODEL_002", fatal=True, id_="a")
        peer.closed()
        return Answer()
    expect(event is not None, "the connection ended without an answer")
    answer = peer.answer()
    answer.results.insert(0, event or {})
    return answer


@case("3.12.1", "embed is answered by vectors of length 1, or refused without a model for it")
def _(server: Server) -> None:
    answer = _encoded(server, {"type": "embed", "id": "a", "input": ["one", "two"]})
    found = [vector for event in answer.results for vector in event["vectors"]]
    expect(not answer.results or len(found) == 2, f"there are {len(found)} vectors for 2 texts")
    for text in found:
        data = base64.b64decode(text, validate=True)
        numbers = struct.unpack(f"<{len(data) // 4}f", data)
        length = sum(number**2 for number in numbers)
        expect(abs(length - 1) < 1e-3, f"a vector has length {length**0.5}")


@case("3.12.2", "rerank is answered by scores, best first, or refused without a model for it")
def _(server: Server) -> None:
    request = {"type": "rerank", "id": "a", "query": "x", "documents": ["y", "z"]}
    answer = _encoded(server, request)
    scores = [pair for event in answer.results for pair in event["scores"]]
    expect(not answer.results or {number for number, _ in scores} == {0, 1}, "a score is missing")
    expect(scores == sorted(scores, key=lambda pair: -pair[1]), f"not best first: {scores}")


@case("3.13.1", "loading events come only before all others")
def _(server: Server) -> None:
    peer = server.connect(generate(progress=True))
    kinds: list[str] = []
    while not kinds or kinds[-1] != "eos":
        kinds.append(str((peer.read() or {"event": "eos"})["event"]))
    expect("loading" not in kinds[kinds.index("token") :], "loading came behind a token")


@case("3.14.1", "an adapter that is not there is refused")
def _(server: Server) -> None:
    message = generate(lora=[{"name": "no-such-adapter"}])
    server.refuses(message, "E_MODEL_002", id_="a")
    server.ask(lora=[])
