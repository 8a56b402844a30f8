"""Agents of the scene agentx: sessions of a trace, limits, and how many a server holds."""

from benches.clients import Answer, Job
from benches.contest import OURS, Medians, System
from benches.scenes.agentx import (
    ChatWire,
    Limits,
    Played,
    figures,
    held,
    rows_of,
    sessions_of,
    text_of,
)

ROWS = [
    {"session_id": "a", "input_length": 700, "output_length": 10, "hash_ids": [0, 1]},
    {"session_id": "a", "input_length": 100, "output_length": 10, "hash_ids": [2], "delay": 1500.0},
    {"session_id": "a", "input_length": 900, "output_length": 10, "hash_ids": [3, 4]},
    {"session_id": "b", "input_length": 700, "output_length": 10, "hash_ids": [0, 5]},
]
LIMITS = Limits(ttft_s=2.0, pace=20.0)


def turn(session: str = "a", number: int = 1, ttft_s: float = 1.0, pace: float = 25.0) -> Played:
    return Played(session, number, ttft_s, 100 / pace, 101, 1000)


def test_a_session_ends_at_the_context_and_one_of_a_single_turn_is_left_out() -> None:
    found = sessions_of(ROWS, turns=8, context=1500)
    assert [[each.tokens for each in turns] for turns in found.values()] == [[700, 100]]
    assert [row["delay"] for row in rows_of(found)] == [0.0, 1500.0]


def test_a_block_has_the_same_text_in_every_session() -> None:
    a, b = (sessions_of([row, row], 2, 10_000) for row in (ROWS[0], ROWS[3]))
    first, second = (text_of(found[name][0], "1").split() for found, name in ((a, "a"), (b, "b")))
    # 15 words and a line end are 16 tokens, so the 512 tokens of the first block are 480 words.
    assert first[:480] == second[:480]
    assert first[480:] != second[480:]


def test_a_chat_and_a_question_go_to_their_endpoints() -> None:
    wire = ChatWire(1)
    assert wire.request(Job("a", '[{"role":"user"}]', 1)).startswith(b"POST /v1/chat/completions")
    assert wire.request(Job("a", "the of", 1)).startswith(b"POST /completion")


def test_tokens_of_a_chat_are_those_that_the_server_counts() -> None:
    wire, answer = ChatWire(1), Answer(0.0)
    for at, text in ((1.0, ""), (2.0, "of"), (3.0, " the")):
        wire.note(answer, at, {"choices": [{"delta": {"content": text}}]})
    wire.note(answer, 3.0, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
    assert (answer.ttft_s, answer.completion_tokens) == (2.0, 5)


def test_a_first_turn_may_wait_and_a_slow_answer_may_not() -> None:
    turns = [turn("a", 0, ttft_s=30), turn("a"), turn("b", 0), turn("b", pace=19.0)]
    found = figures(turns, LIMITS, 10.0)
    assert (found["within"], found["later_p95_s"]) == (1, 1.0)


def test_a_server_holds_the_agents_before_the_first_number_that_fails() -> None:
    systems = [System(OURS, "", lambda _seed: {}, f"agents={n}") for n in (4, 1, 2)]
    rows = [
        {"family": OURS, "knob": "", "case": f"agents={n}", "later_p95_s": ttft, "pace_p5": 25.0}
        for n, ttft in ((4, 1.0), (1, 1.0), (2, 2.1))
    ]
    assert held(Medians(systems, rows), systems[0], LIMITS) == 1
