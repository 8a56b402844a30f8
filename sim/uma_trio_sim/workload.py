"""Who sends what, when: applications that behave like people and programs, drawn from a seed.

An application opens *sessions*. Sessions come in bursts: the times between them are Gamma with a
coefficient of variation of 2. A session asks its first question when it opens, and each further
one a thinking time after the answer before it. Thinking times, prompts and answers are log-normal.
Everything is drawn from the seed and nothing depends on how quickly answers come, so every policy
gets the same work.

Each turn also says how many of its prompt's tokens earlier prompts had: the application's
instructions and, in a conversation, all that was said. The engine computes the whole prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from attrs import frozen

from uma_trio.words import Awaits, Lane
from uma_trio_sim.world import World

BURSTINESS = 2.0  # coefficient of variation of the times between sessions
SPREAD = 0.6  # sigma of the logarithm of lengths and thinking times
ENDLESS = 1_000_000


@frozen(kw_only=True)
class Application:
    """One program; times in seconds, lengths in tokens. `think_s`, `prompt` and `answer` are medians.

    A new session opens every `every_s` on average, and `open_at_once` are open from the start.
    `shared` tokens begin every prompt. In a conversation a prompt also has all that was said
    before, and the conversation begins anew when its prompt has reached `most_prompt` tokens.
    Of interactive answers somebody `awaits` the tokens as they come, or the end.
    A policy is judged by the latencies of `watched` applications; the others are load.
    """

    name: str
    lane: Lane
    prompt: int
    answer: int
    think_s: float = 0.0
    every_s: float | None = None
    open_at_once: int = 1
    turns: int = ENDLESS
    shared: int = 0
    conversation: bool = False
    most_prompt: int = 4000
    most_answer: int = 400
    spread: float = SPREAD
    watched: bool = True
    awaits: Awaits = "tokens"


@frozen
class Turn:
    """One request, sent `think_s` after the answer before it. Earlier prompts had `shared` tokens of it."""

    think_s: float
    prompt: int
    answer: int
    shared: int = 0


@frozen(eq=False)
class Session:
    """Requests of one client, one after another, the first at `start`."""

    client: int
    lane: Lane
    start: float
    turns: Iterable[Turn]
    awaits: Awaits = "tokens"


WORKLOADS: dict[str, tuple[Application, ...]] = {
    # Medians as in published chat and coding traces, shortened to what a small machine answers.
    "desk": (
        Application(
            name="editor", lane="interactive", prompt=300, answer=12, think_s=1.5, shared=120
        ),
        Application(
            name="terminal", lane="interactive", prompt=60, answer=120, think_s=4.0,
            conversation=True, most_prompt=3000,
        ),
        Application(
            name="agent", lane="interactive", prompt=150, answer=40, think_s=0.5, every_s=20.0,
            open_at_once=0, turns=8, shared=200, conversation=True, most_prompt=3000,
        ),
        Application(
            name="nightly", lane="background", prompt=500, answer=150, open_at_once=3,
            watched=False,
        ),
    ),
    "storm": (
        Application(name="reader", lane="interactive", prompt=30, answer=400, spread=0.0),
        *(
            Application(
                name=f"prompts-{i}", lane="background", prompt=506, answer=1, spread=0.0,
                watched=False,
            )
            for i in (1, 2, 3)
        ),
    ),
    "paste": (
        Application(
            name="chat", lane="interactive", prompt=40, answer=200, think_s=1.0, conversation=True,
        ),
        Application(
            name="paste", lane="interactive", prompt=3000, answer=60, think_s=5.0, spread=0.2,
            watched=False,
        ),
    ),
    "fairness": (
        Application(name="reader", lane="interactive", prompt=40, answer=200, think_s=3.0),
        Application(
            name="greedy", lane="background", prompt=400, answer=100, open_at_once=10,
            watched=False,
        ),
        Application(name="light", lane="background", prompt=400, answer=100, watched=False),
    ),
    # Four coding agents and more that come and go, beside a person who asks short questions.
    "agents": (
        Application(
            name="person", lane="interactive", prompt=60, answer=100, think_s=1.0,
        ),
        *(
            Application(
                name=f"agent-{i}", lane="interactive", prompt=60, answer=40, shared=150,
                conversation=True, most_prompt=1500, awaits="answer", watched=False,
            )
            for i in range(1, 5)
        ),
        Application(
            name="comers", lane="interactive", prompt=60, answer=40, every_s=15.0,
            open_at_once=0, turns=6, shared=150, conversation=True, most_prompt=1500,
            awaits="answer", watched=False,
        ),
    ),
    # Eight prompts at once, again and again, for whose answers programs wait.
    "bursts": (
        Application(
            name="chat", lane="interactive", prompt=60, answer=150, think_s=2.0,
        ),
        *(
            Application(
                name=f"program-{i}", lane="interactive", prompt=500, answer=40, think_s=20.0,
                spread=0.0, awaits="answer", watched=False,
            )
            for i in range(1, 9)
        ),
    ),
    # Many small questions beside somebody who pastes a book.
    "huge": (
        *(
            Application(
                name=f"small-{i}", lane="interactive", prompt=80, answer=20, think_s=5.0,
                awaits="answer",
            )
            for i in range(1, 9)
        ),
        Application(
            name="book", lane="interactive", prompt=4000, answer=60, think_s=10.0, spread=0.1,
            awaits="answer", watched=False,
        ),
    ),
}  # fmt: skip


def sessions(
    applications: Iterable[Application], seed: object, seconds: float
) -> tuple[Session, ...]:
    """Return all sessions that open within `seconds`; clients are numbered from 1, in order."""
    return tuple(
        Session(client, app.lane, start, list_of_turns, app.awaits)
        for client, app in enumerate(applications, start=1)
        for start, list_of_turns in _sessions(app, f"{seed}/{app.name}", seconds)
    )


def _sessions(
    app: Application, seed: str, seconds: float
) -> Iterator[tuple[float, Iterator[Turn]]]:
    draw = random.Random(seed)
    numbers = count()
    for _ in range(app.open_at_once):
        # Programs do not all begin in the same instant.
        yield draw.uniform(0.0, 1.0), turns(app, f"{seed}/{next(numbers)}")
    at = 0.0
    while app.every_s is not None:
        at += gamma(draw, app.every_s)
        if at >= seconds:
            return
        yield at, turns(app, f"{seed}/{next(numbers)}")


def gamma(draw: random.Random, mean: float) -> float:
    """Return a time of that mean until the next arrival, in bursts."""
    shape = 1.0 / BURSTINESS**2
    return draw.gammavariate(shape, mean / shape)


def turns(app: Application, seed: str) -> Iterator[Turn]:
    """Yield the turns of one session, each drawn when it is wanted: a session may be endless."""
    draw = random.Random(seed)
    said = 0

    def around(median: float) -> float:
        return median * draw.lognormvariate(0.0, app.spread)

    for n in range(app.turns):
        new = max(1, round(around(app.prompt)))
        answer = max(1, min(app.most_answer, round(around(app.answer))))
        think_s = around(app.think_s) if n else 0.0
        shared = app.shared + said
        prompt = min(app.most_prompt, shared + new)
        yield Turn(think_s, prompt, answer, min(shared, prompt - 1))
        if app.conversation:
            said = 0 if prompt == app.most_prompt else said + new + answer


def play(world: World, work: Iterable[Session]) -> None:
    """Schedule the questions of all sessions in `world`."""
    for session in work:
        world.at(session.start, _asking(world, session, iter(session.turns)))


def _asking(world: World, session: Session, left: Iterator[Turn]) -> Callable[[], None]:

    def ask(turn: Turn | None = None) -> None:
        turn = turn or next(left, None)
        if turn is not None:
            world.submit(
                turn.prompt,
                turn.answer,
                client=session.client,
                lane=session.lane,
                on_end=think,
                awaits=session.awaits,
            )

    def think() -> None:
        turn = next(left, None)
        if turn is not None:
            world.at(world.clock.now + turn.think_s, lambda: ask(turn))

    return ask
