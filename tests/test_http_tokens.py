"""Token ids of any number are refused by their number, or read and written a few thousand at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from http_kit import http_house
from hypothesis import given
from hypothesis import strategies as st
from net_kit import at_once
from trio.testing import MockClock

from uma_trio.api import prompts
from uma_trio.api.prompts import ids_of, written_ids
from uma_trio.http.errors import Fault
from uma_trio.text.slices import utf8, utf8_length


class Unlooked(list[Any]):
    """A list whose items must not be looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody looks at the items")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("somebody looks at the items")


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40))
def test_ids_come_back_as_they_were(value: list[int]) -> None:
    """As an array, and as JSON."""
    ids = ids_of(value, "tokens")
    assert ids.dtype == np.int32
    assert ids.tolist() == value
    assert written_ids(ids) == f'{{"tokens":{value}}}'.replace(" ", "").encode()


@pytest.mark.parametrize("bad", [-1, 1 << 31, 1 << 80, 1.0, True, None, "1", []])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9000])
def test_the_first_id_at_fault_is_named(bad: Any, place: int) -> None:
    """Wherever it stands."""
    value: list[Any] = [5] * 10_000
    value[place] = bad
    with pytest.raises(Fault) as fault:
        ids_of(value, "prompt")
    assert fault.value.param == f"prompt[{place}]"


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/completions"])
async def test_a_prompt_of_more_ids_than_the_context_is_refused_by_its_length(
    autojump_clock: MockClock, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No item of it is looked at; the answer says how many there are and how many fit."""
    monkeypatch.setattr(
        "uma_trio.api.bodies.document_of", lambda *_: {"prompt": Unlooked([5] * 9000)}
    )
    async with http_house() as daemon:
        answer = await daemon.ask("POST", path, {"prompt": "ignored"})
        assert answer.status == 400
        assert "9000" in answer.error["message"]
        assert str(daemon.inner.served.bounds.n_ctx_seq) in answer.error["message"]


async def test_more_tokens_than_are_taken_are_not_turned_into_text(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused by their number, and as many as are allowed by the length of their text."""
    async with http_house(body_values=5000) as daemon:
        answer = await daemon.ask("POST", "/detokenize", {"tokens": [104] * 5001})
        assert (answer.status, "5001" in answer.json["error"]["message"]) == (400, True)
        answer = await daemon.ask("POST", "/detokenize", {"tokens": [104] * 5000})
        assert len(answer.json["content"].encode()) == 5000
    async with http_house(body_values=5000, max_prompt_bytes=1000) as daemon:
        asked = b'{"tokens":[%b]}' % b",".join([b"5"] * 1500)
        monkeypatch.setattr(prompts, "MANY", 16)
        served = daemon.inner.served
        monkeypatch.setattr(type(served), "detokenize", lambda self, ids: b"x" * 10 * len(ids))
        assert (await daemon.ask("POST", "/detokenize", asked)).status == 413


async def test_long_texts_are_tokenised_and_written_in_parts(autojump_clock: MockClock) -> None:
    """The answer is the same document; with pieces a text has to be shorter."""
    async with http_house() as daemon:
        client = daemon.connect(by_socket=True)
        text = "héllo wörld " * 700
        ids = (await client.ask("POST", "/tokenize", {"content": text})).json["tokens"]
        assert len(ids) > 8192
        asked = {"content": text, "with_pieces": True}
        pieces = (await client.ask("POST", "/tokenize", asked)).json["tokens"]
        assert [piece["id"] for piece in pieces] == ids
        answer = await daemon.ask("POST", "/tokenize", {**asked, "content": "x" * 262_145})
        assert (answer.status, answer.json["error"]["param"]) == (413, "content")


@given(st.text(max_size=200))
def test_text_in_slices_is_encoded_as_in_one(text: str) -> None:
    """To the same bytes, and as many."""
    assert utf8(text) == text.encode("utf-8", "replace")
    assert utf8_length(text) == len(utf8(text))


@pytest.mark.parametrize("stream", [False, True])
async def test_many_probabilities_are_written_in_a_helper_thread(
    autojump_clock: MockClock, stream: bool
) -> None:
    """Each token's alternatives are a piece of their own; the answer is the same as if it were short."""
    aside: list[Any] = []

    async def noting(function: Any) -> Any:
        aside.append(function)
        return await at_once(function)

    asked = {
        "prompt": "hello " * 40,
        "max_tokens": 2,
        "echo": True,
        "logprobs": 3,
        "stream": stream,
    }
    async with http_house(run_blocking=noting) as daemon:
        client = daemon.connect(by_socket=True)
        answer = await client.ask("POST", "/v1/completions", asked)
        if stream:
            found = [e["choices"][0]["logprobs"] for e in answer.events[:-1] if e["choices"]]
            told = next(one for one in found if one is not None)
        else:
            told = answer.json["choices"][0]["logprobs"]
    assert len(told["tokens"]) >= 240
    assert told["top_logprobs"][0] is None
    assert all(1 <= len(top) <= 3 for top in told["top_logprobs"][1:])
    assert any("write" in function.__qualname__ for function in aside)
