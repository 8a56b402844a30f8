"""Incremental text: UTF-8 over token borders, stop strings, any split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from uma_trio.text.stream import TokenText


def cut(text: str, stops: Sequence[str]) -> str:
    """Say what may be sent of `text`, in the plainest way."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Cut `data` at the given places (taken modulo its length)."""
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


def run(pieces: Sequence[bytes], stops: Sequence[str] = ()) -> tuple[list[str], TokenText]:
    """Push each piece as a token of its own, then finish."""
    text = TokenText(pieces, tuple(stops))
    out = [text.push(token) for token in range(len(pieces))]
    return [*out, text.finish()], text


CUTS = st.lists(st.integers(0, 1000), max_size=12)
FEW_CHARS = st.text(alphabet="ab€\U0001f600", max_size=40)


@given(st.binary(max_size=60), CUTS)
def test_any_bytes_in_any_split_give_the_decoded_whole(data: bytes, cuts: list[int]) -> None:
    """Joined, the parts are the whole decoded at once, and each part is valid UTF-8."""
    parts, _ = run(pieces_of(data, cuts))
    assert "".join(parts) == data.decode("utf-8", "replace")
    assert all(part.encode("utf-8").decode("utf-8") == part for part in parts)


@given(FEW_CHARS, st.lists(st.text(alphabet="ab€", max_size=5), max_size=8), CUTS)
def test_any_split_is_cut_at_the_first_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """With stop strings the parts end right before the first one that is complete."""
    parts, stream = run(pieces_of(text.encode(), cuts), stops)
    assert "".join(parts) == cut(text, stops)
    assert (stream.stopped is not None) == any(stop and stop in text for stop in stops)


@given(st.binary(max_size=40), st.lists(st.text(alphabet="a\ufffdb", min_size=1), max_size=3), CUTS)
def test_stop_strings_see_what_a_reader_sees(
    data: bytes, stops: list[str], cuts: list[int]
) -> None:
    """Invalid bytes are U+FFFD to a stop string, too, in any split."""
    parts, _ = run(pieces_of(data, cuts), stops)
    assert "".join(parts) == cut(data.decode("utf-8", "replace"), stops)


@given(FEW_CHARS, st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), max_size=4), CUTS)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """What is held back is the longest end of the text that begins a stop string."""
    pieces = pieces_of(text.encode(), cuts)
    stream = TokenText(pieces, tuple(stops))
    sent, data = "", b""
    for token, piece in enumerate(pieces):
        sent += stream.push(token)
        data += piece
        if stream.stopped:
            return
        whole = data.decode("utf-8", "ignore")
        begun = [n for stop in stops for n in range(len(stop)) if whole.endswith(stop[:n])]
        assert sent == whole[: len(whole) - max(begun, default=0)]


def test_a_character_is_held_back_until_its_last_byte() -> None:
    """A four-byte character over four tokens comes with the fourth."""
    assert run([b"\xf0", b"\x9f", b"\x98", b"\x80"])[0] == ["", "", "", "\U0001f600", ""]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    """A text that ends inside a character ends with U+FFFD, from `finish`."""
    assert run([b"a", b"\xe2\x82"])[0] == ["a", "", "\ufffd"]


def test_a_stop_string_over_three_tokens_is_never_sent() -> None:
    """The beginning waits, and is dropped when the rest arrives."""
    parts, stream = run([b"x<", b"en", b"d>y"], ["<end>"])
    assert parts == ["x", "", "", ""]
    assert stream.stopped == "<end>"


def test_the_beginning_of_a_stop_string_is_sent_at_the_end() -> None:
    """What never became a stop string comes out with `finish`."""
    parts, stream = run([b"x<", b"en"], ["<end>"])
    assert parts == ["x", "", "<en"]
    assert stream.stopped is None


def test_the_stop_string_that_is_complete_first_wins() -> None:
    """A string that ends earlier beats one that began earlier, so the "a" is text."""
    parts, stream = run([b"ab", b"cd"], ["abcd", "bc"])
    assert (parts, stream.stopped) == (["", "a", ""], "bc")


def test_nothing_comes_after_a_stop_string() -> None:
    """Tokens behind a stop string in the same tick are silent."""
    assert run([b"a.", b"b", b"c"], ["."])[0] == ["a", "", "", ""]


def test_an_empty_token_gives_no_text() -> None:
    """Control tokens have no bytes and change nothing."""
    assert run([b"a", b"", b"\xc3", b"", b"\xa9"])[0] == ["a", "", "", "", "é", ""]


def test_empty_stop_strings_stop_nothing() -> None:
    """An empty stop string is left out."""
    assert run([b"ab"], ["", ""])[0] == ["ab", ""]


def test_a_token_costs_the_same_after_a_long_history() -> None:
    """What is kept between tokens does not grow with the text."""
    stream = TokenText([b"aaaa", b"\xe2"], ("aaaab", "zz"))
    for _ in range(1000):
        stream.push(0)
    stream.push(1)
    assert stream.finish() == "aaaa\ufffd"
    assert len(stream._bytes) <= 3
