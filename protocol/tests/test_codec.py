"""Documents: what is accepted, what is refused, with which code and which words."""

import json
import math

import msgspec
import pytest

from uma_protocol import (
    Cancel,
    Code,
    Explain,
    Generate,
    GetMetrics,
    LocalProtocolError,
    Message,
    RemoteProtocolError,
    SetPriority,
    Slo,
    Timings,
    Token,
    codec,
    decode_event,
    decode_request,
    encode_event,
    encode_request,
    rules,
)
from uma_protocol.conformance.documents import EVENTS, REQUESTS
from uma_protocol.rules import FieldFault
from uma_protocol.scan import MAX_BARE_BYTES, MAX_DEPTH, MAX_ESCAPES, MAX_NODES


def _refused(document):
    payload = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(RemoteProtocolError) as caught:
        decode_request(payload)
    assert caught.value.fatal is False
    return caught.value


def _generate(**fields):
    return {"id": "a", "prompt": "p", **fields}


# --- both directions ---


@pytest.mark.parametrize("payload", REQUESTS)
def test_requests_are_written_in_the_order_of_their_fields(payload):
    """The head of a frame can be read by a router: type, then the fields as declared."""
    assert encode_request(decode_request(payload)) == payload


def test_an_absent_part_of_an_object_is_left_out():
    """One target without the other is written without a null."""
    request = Generate("a", slo=Slo(target_tbt_ms=40.0), prompt="p")
    assert encode_request(request).endswith(b'"slo":{"target_tbt_ms":40.0},"prompt":"p"}')


@pytest.mark.parametrize("payload", EVENTS)
def test_events_are_written_id_first(payload):
    """An event begins with its id, if it has one, and never contains null for what is absent."""
    assert encode_event(decode_event(payload)) == payload


# --- spellings ---


def test_a_request_without_type_asks_for_text():
    """The seeds' quick-start client sends no type."""
    payload = b'{"id": "quickstart-1", "prompt": "Hello", "stream": true, "max_tokens": 20}'
    assert decode_request(payload) == Generate("quickstart-1", prompt="Hello", max_tokens=20)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"event":"cancel","id":"a"}', Cancel("a")),
        (b'{"event":"metrics"}', GetMetrics()),
    ],
)
def test_cancel_and_metrics_may_be_spelled_as_events(payload, expected):
    """The seeds name these two by `event`."""
    assert decode_request(payload) == expected


@pytest.mark.parametrize("word", ["generate", "sessions", "eos", 1, None, ["cancel"]])
def test_no_other_request_is_spelled_as_an_event(word):
    """A client that sends a server's event is told about `type`."""
    error = _refused({"event": word, "id": "a"})
    assert (error.code, error.field) == (Code.E_PROTO_003, "event")


def test_type_and_event_together_are_refused():
    """One of them says what a request is; the other is an unknown field."""
    error = _refused({"type": "cancel", "event": "cancel", "id": "a"})
    assert (error.code, error.field) == (Code.E_PROTO_003, "event")


def test_a_number_may_be_written_without_a_point():
    """JSON does not tell 1 from 1.0, and neither do fields that are numbers."""
    request = decode_request(b'{"id":"a","prompt":"p","temperature":1,"slo":{"target_tbt_ms":5}}')
    assert request == Generate("a", prompt="p", temperature=1.0, slo=Slo(target_tbt_ms=5.0))
    assert type(request.temperature) is float


@pytest.mark.parametrize("text", ["\x00\x1b[31m", "\U0001f600", "\u2028", 'a"b\\', "\ufeff"])
def test_any_unicode_text_is_a_prompt(text):
    """Control characters and emoji are text like any other in a prompt."""
    assert decode_request(json.dumps(_generate(prompt=text)).encode()).prompt == text


# --- not acceptable JSON: E_PROTO_001 ---


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "too early"),
        (b"nonsense", "not valid JSON"),
        (b'{"id":"a",}', "trailing comma"),
        (b'{"id":"a"} {}', "trailing characters"),
        (b'{"id":"a"', "too early"),
        (b'{"id":"a\n"}', "not valid JSON"),
        (b"]]]]", "not valid JSON"),
        (b'{"id":"a","temperature":NaN}', "not valid JSON"),
        (b'{"id":"a","temperature":-Infinity}', "not valid JSON"),
        (b'{"id":"a","temperature":1e999}', "too large"),
        (b'{"id":"a","seed":' + b"9" * 5000 + b"}", "too large"),
        (b'{"id":"\xff"}', "UTF-8"),
        (b'{"id":"\xed\xa0\x80"}', "UTF-8"),
        (b'\xef\xbb\xbf{"id":"a"}', "byte order mark"),
        ('{"id":"a"}'.encode("utf-16"), "byte order mark"),
        ('{"id":"a"}'.encode("utf-16-le"), "UTF-16"),
        ('{"id":"a"}'.encode("utf-16-be"), "UTF-16"),
        ('{"id":"a"}'.encode("utf-32-be"), "UTF-32"),
        (b'{"id":"\\ud800"}', "half a surrogate pair"),
        (b'{"id":"a","prompt":"\\uD83D and more"}', "surrogate pair"),
        (b'{"id":"a","prompt":"\\udc00x"}', "not valid JSON"),
        (b'{"id":"a","prompt":"\\ud83d\\u0041"}', "not valid JSON"),
    ],
)
def test_what_is_not_json_is_refused(payload, words):
    """Each departure from strict JSON in UTF-8 is refused and named."""
    error = _refused(payload)
    assert error.code is Code.E_PROTO_001
    assert words in error.message


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b'{"id":"a","prompt":"p","prompt":"q"}', "prompt"),
        (b'{"id":"a","prompt":"p","slo":{"target_tbt_ms":1,"target_tbt_ms":2}}', "target_tbt_ms"),
        (b'{"id":"a","prompt":"p","metadata":{"x":[{"y":1,"\\u0079":2}]}}', "y"),
    ],
)
def test_a_name_given_twice_is_refused(payload, field):
    """Parsers disagree about which value counts, so neither does, at any depth."""
    error = _refused(payload)
    assert (error.code, error.field, error.request_id) == (Code.E_PROTO_001, field, "a")


def test_an_id_given_twice_is_not_repeated():
    """When the id itself is ambiguous the answer names none."""
    assert _refused(b'{"id":"a","id":"b","prompt":"p"}').request_id is None


def test_colons_in_text_are_not_members():
    """Duplicates are found by counting, and strings do not disturb the count."""
    text = '":" \\" {"a":1,"a":2} \\'
    assert decode_request(json.dumps(_generate(prompt=text)).encode()).prompt == text


def _nested(depth):
    """A request whose metadata makes the document so many levels deep."""
    inner = "[" * (depth - 2) + "]" * (depth - 2)
    return b'{"id":"a","prompt":"p","metadata":{"x":' + inner.encode() + b"}}"


def test_depth_up_to_the_limit_is_accepted():
    """Thirty-two levels are allowed."""
    assert decode_request(_nested(MAX_DEPTH)).metadata


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1000, 4000])
def test_depth_over_the_limit_is_refused(depth):
    """One level more is refused before the parser could recurse."""
    error = _refused(_nested(depth))
    assert error.code is Code.E_PROTO_001
    assert "deeper" in error.message


def test_brackets_in_text_are_not_depth():
    """Only structure counts."""
    assert decode_request(json.dumps(_generate(prompt="[{" * 5000)).encode()).prompt


def _many(nodes):
    """A request of exactly so many values."""
    return json.dumps(_generate(metadata={"x": [0] * (nodes - 5)}), separators=(",", ":")).encode()


def test_nodes_up_to_the_limit_reach_the_fields():
    """A document of 4096 values is parsed; what it is refused for here is a field's own bound."""
    error = _refused(_many(MAX_NODES))
    assert (error.code, error.field) == (Code.E_PROTO_003, "metadata")


def test_an_empty_container_is_one_node():
    """Containers are counted by what they are and by what they hold, and empty ones hold nothing."""
    empty = json.dumps(_generate(metadata={"x": [{}, []] * ((MAX_NODES - 5) // 2)})).encode()
    assert _refused(empty).field == "metadata"


def test_nodes_over_the_limit_are_refused():
    """One value more is refused as a whole."""
    error = _refused(_many(MAX_NODES + 1))
    assert (error.code, error.field) == (Code.E_PROTO_001, None)
    assert str(MAX_NODES) in error.message


@pytest.mark.parametrize(
    "unit", [b"{},", b'"",', b"[", b"]", b'\\"', b"\\", b'"', b":", b",", b'{"":', b"1,", b" "]
)
def test_a_bomb_is_refused_before_its_values_are_built(unit, monkeypatch):
    """A mebibyte of anything never reaches the parser, or the parser fails at its first byte."""
    parsed = []

    def decode(payload):
        parsed.append(payload)
        return msgspec.json.decode(payload)

    monkeypatch.setattr(codec, "_decode_any", decode)
    error = _refused(unit * ((1 << 20) // len(unit)))
    assert error.code is Code.E_PROTO_001
    assert not parsed or "byte 0" in error.message or unit == b" "


def test_a_name_as_large_as_a_frame_is_compared_with_no_field(monkeypatch):
    """The search for a similar name, which is quadratic, is not made for names nobody would choose."""

    def compare(*_arguments, **_options):
        raise AssertionError

    monkeypatch.setattr("difflib.get_close_matches", compare)
    payload = b'{"id":"a","prompt":"p","' + b"max_tokens" * 100_000 + b'":1}'
    assert _refused(payload).code is Code.E_PROTO_003
    with pytest.raises(AssertionError):
        decode_request(b'{"id":"a","prompt":"p","max_token":1}')


# --- not a request: E_PROTO_003 ---


@pytest.mark.parametrize("payload", [b"[]", b"1", b'"x"', b"null", b"true"])
def test_json_that_is_not_an_object_is_a_bad_request(payload):
    """It was JSON, so the code says so."""
    error = _refused(payload)
    assert (error.code, error.request_id) == (Code.E_PROTO_003, None)


# One value for each way to break each rule: name, value, a part of the message.
BAD = [
    ("id", 1, "1 to 128 bytes"),
    ("id", "", "1 to 128 bytes"),
    ("id", "x" * 129, "129 bytes"),
    ("id", "ü" * 65, "130 bytes"),
    ("id", "a\nb", "control"),
    ("id", "a\x7f", "control"),
    ("session", "", "1 to 256 bytes"),
    ("cache", "a\nb", "control"),
    ("model", ["m"], "a list of 1"),
    ("app", "\x1b[2J", "control"),
    ("priority", "urgent", "one of interactive, background"),
    ("priority", 1, "one of interactive, background"),
    ("max_tokens", 0, "from 1 to"),
    ("max_tokens", -5, "it is -5"),
    ("max_tokens", True, "it is true"),
    ("max_tokens", 20.0, "an integer"),
    ("max_tokens", "20", "a string of 2 bytes"),
    ("max_tokens", 2**31, "to 2147483647"),
    ("max_tokens", None, "leave the field out"),
    ("max_tokens", 10**30, "out of any range"),
    ("default_temperature", -1, "from 0 to 100"),
    ("temperature", -0.1, "from 0 to 100"),
    ("temperature", 101, "from 0 to 100"),
    ("temperature", False, "it is false"),
    ("temperature", "hot", "a number"),
    ("top_p", 1.01, "from 0 to 1"),
    ("top_k", -2, "from -1"),
    ("min_p", 2, "from 0 to 1"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -2.1, "from -2 to 2"),
    ("repeat_penalty", 0, "from 0.01 to 100"),
    ("repeat_last_n", -2, "from -1"),
    ("logit_bias", [[1, 2]], "at most 1024 token ids"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "at most 1024 token ids"),
    ("logit_bias", {"hello": 1}, "a name is not a token id"),
    ("logit_bias", {"-1": 1}, "a name is not a token id"),
    ("logit_bias", {"01": 1}, "a name is not a token id"),
    ("logit_bias", {"2147483648": 1}, "a name is not a token id"),
    ("logit_bias.7", {"7": 100.5}, "from -100 to 100"),
    ("logit_bias.7", {"7": True}, "it is true"),
    ("stop_token_ids", 2, "a list of 0 to 64"),
    ("stop_token_ids[1]", [2, -1], "from 0"),
    ("min_tokens", -1, "from 0"),
    ("logprobs", 21, "from 0 to 20"),
    ("logprobs", True, "it is true"),
    ("continue_final_message", 1, "true or false"),
    ("chat_template_kwargs", [], "an object"),
    ("chat_template_kwargs", {"x": "y" * 4090}, "4096 bytes"),
    ("speculation", "on", "one of off, free, auto"),
    ("pace", "slow", "one of smooth, asap"),
    ("awaits", "nobody", "one of tokens, answer, nothing"),
    ("progress", 1, "true or false"),
    ("lora", {}, "a list of 0 to 64"),
    ("lora[0].id", [{"id": -1}], "from 0"),
    ("lora[0].scale", [{"id": 0, "scale": 101}], "from -100 to 100"),
    ("lora[1].adapter", [{"id": 0}, {"adapter": "x"}], "is not a known field"),
    ("pace", None, "one of smooth, asap"),
    ("reasoning_effort", "huge", "one of none, minimal, low, medium, high, xhigh"),
    ("reasoning_budget", -1, "from 0"),
    ("tools", {}, "a list of 0 to 512"),
    ("tools[0].name", [{"description": "x"}], "is missing"),
    ("tools[1].strict", [{"name": "a"}, {"name": "b", "strict": 1}], "true or false"),
    ("tool_choice", "some", "one of auto, required, none"),
    ("allowed_tools[0]", [""], "1 to 256 bytes"),
    ("parallel_tool_calls", 1, "true or false"),
    ("schema", [], "an object of at most 65536 bytes"),
    ("schema", {"x": "y" * 65_530}, "65536 bytes"),
    ("regex", "", "1 to 65536 bytes"),
    ("grammar", 1, "1 to 16384 bytes"),
    ("choice", [], "a list of 1 to 256"),
    ("choice[1]", ["a", ""], "1 to 4096 bytes"),
    ("seed", 2**63, "to 9223372036854775807"),
    ("seed", -(2**63), "from -9223372036854775807"),
    ("n", 0, "from 1 to 128"),
    ("n", 129, "from 1 to 128"),
    ("n", True, "it is true"),
    ("stop", "x", "a list"),
    ("stop", ["x"] * 129, "0 to 128"),
    ("stop[1]", ["x", ""], "1 to 256 bytes"),
    ("stop[0]", [1], "a string"),
    ("stream", 1, "true or false"),
    ("stream", "true", "true or false"),
    ("ignore_eos", 0, "true or false"),
    ("slo", [], "an object with"),
    ("slo.target_ttft_ms", {"target_ttft_ms": 0}, "from 1"),
    ("slo.target_tbt_ms", {"target_tbt_ms": True}, "it is true"),
    ("slo.target_ttft", {"target_ttft": 5}, "did you mean target_ttft_ms?"),
    ("metadata", [1], "an object"),
    ("metadata", {"x": "y" * 4090}, "4096 bytes"),
    ("prompt", "", "not empty"),
    ("prompt", 5, "a string"),
    ("promt", "p", "did you mean prompt?"),
    ("max-tokens", 5, "did you mean max_tokens?"),
    ("n_predict", 5, "not a known field"),
    ("request", 5, "not a known field"),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD)
def test_a_bad_field_is_named(field, value, words):
    """The refusal names the field and the bound, and says what was found."""
    error = _refused(_generate(**{field.split(".")[0].split("[")[0]: value}))
    assert (error.code, error.field) == (Code.E_PROTO_003, field)
    assert error.message.startswith(field)
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"continue_final_message": True}, "continue_final_message", "applies to messages"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "applies to messages"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "applies to messages"),
        ({"tools": [{"name": "a"}]}, "tools", "applies to messages"),
        ({"logprobs": 0, "stream": False}, "logprobs", "stream is false"),
        ({"schema": {}, "regex": "a"}, "regex", "cannot be combined with schema"),
        ({"choice": ["a"], "grammar": "a"}, "grammar", "cannot be combined with choice"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields, field, words):
    """A chat's fields beside a prompt, and what comes with each token where none comes."""
    error = _refused(_generate(**fields))
    assert (error.code, error.field) == (Code.E_PROTO_003, field)
    assert words in error.message


def test_a_field_at_its_default_goes_with_anything():
    """A client that writes out every field is understood."""
    payload = _generate(continue_final_message=False, chat_template_kwargs={}, stream=False)
    assert decode_request(json.dumps(payload).encode()).stream is False


def test_every_field_has_a_bad_example():
    """A field that is added must show how it is refused."""
    tried = {field.split(".")[0].split("[")[0] for field, _, _ in BAD} | {"messages"}
    assert set(Generate.__struct_fields__) <= tried


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        ("hi", "messages", "a list of 1 to 1024"),
        ([], "messages", "a list of 0"),
        (["hi"], "messages[0]", "an object with"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"content": "x"}], "messages[0].role", "is missing"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "system, user, assistant, tool"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content", "a list of 1"),
        ([{"role": "user", "content": "x", "nam": "n"}], "messages[0].nam", "did you mean name?"),
        ([{"role": "tool", "content": "x", "call_id": ""}], "messages[0].call_id", "1 to 256"),
        (
            [{"role": "assistant", "content": "", "calls": [{"id": "a"}]}],
            "messages[0].calls[0].name",
            "is missing",
        ),
    ],
)
def test_a_bad_message_is_named(messages, field, words):
    """Inside a chat the refusal names the message and its field."""
    error = _refused({"id": "a", "messages": messages})
    assert (error.code, error.field, error.request_id) == (Code.E_PROTO_003, field, "a")
    assert words in error.message


@pytest.mark.parametrize(
    ("document", "field", "words"),
    [
        ({"prompt": "p"}, "id", "is missing"),
        ({"id": "a"}, "prompt", "neither"),
        (_generate(messages=[{"role": "user", "content": "x"}]), "prompt", "both"),
        ({"type": "cancel"}, "id", "or request must be given"),
        ({"type": "priority", "priority": "background"}, "request", "neither"),
        (
            {"type": "priority", "id": "a", "request": 1, "priority": "background"},
            "request",
            "both",
        ),
        ({"type": "priority", "id": "a"}, "priority", "is missing"),
        ({"type": "priority", "request": "r-1", "priority": "background"}, "request", "integer"),
        ({"type": "sessions", "all": True}, "all", "not a known field"),
        ({"type": "explain", "request": 0}, "request", "from 1"),
        ({"type": "explain", "ticks": 1001}, "ticks", "from 0 to 1000"),
        ({"type": "explain", "ticks": True}, "ticks", "an integer"),
        ({"type": "explain", "id": "a"}, "id", "not a known field"),
        ({"type": "metrics", "interval_ms": 9}, "interval_ms", "from 10"),
        ({"type": "metrics", "interval": 9}, "interval", "did you mean interval_ms?"),
        ({"type": 1, "id": "a"}, "type", "generate, embed, rerank, hello"),
        ({"type": None}, "type", "generate, embed, rerank, hello"),
    ],
)
def test_a_request_that_does_not_add_up_is_refused(document, field, words):
    """Missing fields, pairs of which exactly one is needed, and bad admin requests."""
    error = _refused(document)
    assert (error.code, error.field) == (Code.E_PROTO_003, field)
    assert words in error.message


def test_an_unknown_type_is_unsupported_and_not_malformed():
    """A newer client finds out what an older daemon cannot do, with a code of its own."""
    error = _refused({"type": "cancle", "id": "a"})
    assert (error.code, error.field, error.request_id) == (Code.E_PROTO_007, "type", "a")
    assert "did you mean cancel?" in error.message


@pytest.mark.parametrize(("found", "carried"), [("a", "a"), ("", None), (5, None), ("\n", None)])
def test_a_refusal_carries_an_id_only_if_it_is_one(found, carried):
    """An id that could not be echoed safely is left out."""
    assert _refused({"id": found, "prompt": "p", "nope": 1}).request_id == carried


TEXT = "the secret plan"


@pytest.mark.parametrize(
    "document",
    [
        _generate(prompt=[TEXT]),
        _generate(priority=TEXT),
        _generate(stop=TEXT),
        {"id": "a", "messages": [{"role": TEXT, "content": "x"}]},
        {"id": "a", TEXT: 1},
        {"id": "a", "type": TEXT},
        {"event": TEXT},
        TEXT,
        f'{{"{TEXT}":1,"{TEXT}":2}}'.encode(),
        f'{{"prompt":"{TEXT}'.encode(),
        f'{{"prompt":"{TEXT}\\ud800"}}'.encode(),
    ],
)
def test_no_refusal_repeats_text(document):
    """Messages end up in logs; text of a prompt does not, wherever a client put it."""
    error = _refused(document)
    assert TEXT not in str(error)
    assert TEXT not in str(error.field)


# --- what we send ---


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Generate("", prompt="p"), "id"),
        (Generate("a"), "prompt"),
        (Generate("a", prompt="p", messages=(Message("user", "x"),)), "prompt"),
        (Generate("a", prompt="p", max_tokens=0), "max_tokens"),
        (Generate("a", prompt="p", temperature=math.nan), "temperature"),
        (Generate("a", prompt="p", temperature=math.inf), "temperature"),
        (Generate("a", prompt="p", metadata={"x": math.nan}), "metadata"),
        (Generate("a", prompt="p", stop=("",)), "stop[0]"),
        (Generate("a", prompt="p", n=129), "n"),
        (SetPriority(priority="background"), "request"),
        (Explain(request=0), "request"),
        (Explain(ticks=1001), "ticks"),
        (GetMetrics(interval_ms=0), "interval_ms"),
    ],
)
def test_a_request_out_of_bounds_is_not_written(request_, field):
    """The sender is told by the same rules and words as the receiver would tell it."""
    with pytest.raises(LocalProtocolError) as caught:
        encode_request(request_)
    assert (caught.value.code, caught.value.field) == (Code.E_PROTO_003, field)
    assert caught.value.fatal is False


@pytest.mark.parametrize("bad", ["\ud800", object()])
def test_what_json_cannot_express_is_not_written(bad):
    """A lone surrogate or a foreign object is an error of ours, not a crash."""
    with pytest.raises(LocalProtocolError):
        encode_request(Generate("a", prompt=bad))
    with pytest.raises(LocalProtocolError):
        encode_event(Token("a", bad, 1))


def test_a_document_too_deep_is_not_written():
    """What the peer would refuse for its shape does not leave either."""
    deep = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(LocalProtocolError, match="deeper"):
        encode_request(Generate("a", prompt="p", metadata={"x": deep}))


# --- events that are read ---


def test_unknown_fields_of_events_are_skipped():
    """A client keeps working when a newer daemon says more."""
    payload = b'{"id":"a","event":"token","text":"x","token_id":1,"logprob":-0.5,"more":{"y":[]}}'
    assert decode_event(payload) == Token("a", "x", 1)


@pytest.mark.parametrize(
    "payload",
    [
        b'{"id":"a","event":"toke","text":"x","token_id":1}',
        b'{"id":"a","event":"token","text":"x"}',
        b'{"id":"a","event":"token","text":1,"token_id":1}',
        b'{"id":"a","event":"token","text":"x","token_id":true}',
        b'{"id":"a","event":"eos","reason":"bored"}',
        b"[]",
    ],
)
def test_what_is_not_an_event_is_refused(payload):
    """A client does not guess what a daemon meant."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_event(payload)
    assert caught.value.code is Code.E_PROTO_003


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b'{"event":"ok","id":"\xff"}',
        b'{"event":"metrics","metrics":{"x":' + b"[" * 100_000,
    ],
)
def test_an_event_that_is_not_json_is_refused(payload):
    """Nor does it fall over garbage."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_event(payload)
    assert caught.value.code is Code.E_PROTO_001


def test_the_time_of_a_first_token_that_never_came_is_absent():
    """Absent is absent, not null and not zero."""
    timings = Timings(queue_ms=1.0, total_ms=2.0, tokens_per_s=0.0)
    assert b"ttft" not in msgspec.json.encode(timings)


def test_a_fault_reads_as_a_sentence():
    """Field and problem together are what a person gets to see."""
    assert FieldFault("seed", "is missing") == ("seed", "is missing")


@pytest.mark.parametrize(
    ("payload", "bound"),
    [
        (b'{"id":"a","x":[' + b"1." + b"7" * MAX_BARE_BYTES + b"]}", MAX_BARE_BYTES),
        (b'{"id":"a"' + b":" * (MAX_BARE_BYTES + 1) + b"}", MAX_BARE_BYTES),
        (b'{"id":"a","prompt":"' + rb"\n" * (MAX_ESCAPES + 1) + b'"}', MAX_ESCAPES),
    ],
    ids=["a long number", "colons", "escapes"],
)
def test_long_numbers_and_many_escapes_are_refused_before_parsing(
    payload: bytes, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser takes most of its time for these, and never gets more of them than stated."""
    parsed: list[bytes] = []
    monkeypatch.setattr(codec, "_decode_any", parsed.append)
    with pytest.raises(RemoteProtocolError, match=str(bound)) as refused:
        decode_request(payload)
    assert refused.value.code is Code.E_PROTO_001
    assert parsed == []


def test_as_many_numbers_and_escapes_as_are_stated_are_read() -> None:
    """The bounds themselves are allowed, and white space outside of strings is not counted."""
    prompt = "\n" * MAX_ESCAPES
    text = json.dumps(_generate(prompt=prompt)).replace(", ", "," + " " * 40_000)
    found = decode_request(text.encode())
    assert isinstance(found, Generate)
    assert found.prompt == prompt


def test_a_large_document_is_not_parsed_twice_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that occurs twice is refused all the same."""
    monkeypatch.setattr(codec.json, "loads", pytest.fail)
    text = json.dumps("a" * 300_000)
    with pytest.raises(RemoteProtocolError, match="twice"):
        decode_request(f'{{"id":"a","prompt":"b","prompt":{text}}}'.encode())


def test_an_object_that_is_far_too_large_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing it to learn its size takes as long as the client likes."""
    monkeypatch.setattr(rules.json, "dumps", pytest.fail)
    for value in (
        {"a": "x" * 100},
        {"a": [1] * 100},
        {"a" * 100: 1},
        {str(n): n for n in range(50)},
    ):
        fault = rules.Object(80).check("schema", value)
        assert fault is not None
        assert "at least" in fault.problem


def test_texts_are_measured_a_slice_at_a_time() -> None:
    """The sum is the size of the whole, and half a surrogate pair is found in any slice."""
    text = "\U0001f600a" * 20_000
    assert rules.Text(len(text.encode()), len(text.encode())).check("prompt", text) is None
    assert rules.Text(0).check("prompt", text + "\ud800") is not None
