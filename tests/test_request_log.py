"""The request log: one line for each answer, whatever its end, and never a word of anybody's text."""

from __future__ import annotations

from net_kit import house

from uma_protocol import Eos, Token
from uma_trio.engine.messages import Finished
from uma_trio.observe.log import withhold
from uma_trio.service.ask import Door, Origin
from uma_trio.service.generation import log_line
from uma_trio.sockets.principal import Principal

PROMPT = "of this nobody may read"


async def test_an_answer_is_one_line_of_figures() -> None:
    """Who asked, what was computed, and how it ended."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(prompt=PROMPT, max_tokens=4, app="editor")
        eos = await client.until(Eos)
        await daemon.until_idle()
        (line,) = daemon.answered
        assert (line["app"], line["lane"], line["reason"]) == ("editor", "interactive", "length")
        assert line["prompt_tokens"] == eos.usage.prompt_tokens
        assert line["tokens"] == eos.usage.completion_tokens == 4
        assert {
            "id",
            "ttft_ms",
            "total_s",
            "tokens_per_s",
            "queue_ms",
            "cached_tokens",
        } <= line.keys()
        assert PROMPT not in str(line)


async def test_each_choice_has_its_own_line() -> None:
    """As each is computed for itself."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=2, n=3, temperature=1.0)
        await client.until(Eos)
        await daemon.until_idle()
        assert [line.get("choice", 0) for line in daemon.answered] == [0, 1, 2]


async def test_a_reader_who_left_is_told_by_the_log() -> None:
    """It was computed for, too."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=200)
        await client.until(Token)
        client.close()
        await daemon.until_idle()
        (line,) = daemon.answered
        assert line["reason"] in ("left", "cancelled")


def test_no_figure_is_taken_for_text() -> None:
    """The log withholds some keys, whatever they hold."""
    end = Finished("stop", "", 3, 2, 1, 0.1, 0.2, 0.3)
    line = log_line(
        1,
        Origin(principal=Principal(connection=1), door=Door(max_prompt_bytes=1), name="r"),
        0,
        "interactive",
        end,
        1.0,
    )
    assert withhold(None, "info", dict(line)) == line
