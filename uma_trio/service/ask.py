"""What is asked of the daemon, and by whom: values that know neither a socket nor a wire format.

Each front translates its own words into an :class:`Ask` and an :class:`Origin`; nothing else of
a request goes below it.
"""

from __future__ import annotations

import random
from hashlib import blake2b

from attrs import evolve, field, frozen

from uma_protocol.errors import Code
from uma_trio.backend.base import IntArray
from uma_trio.engine.messages import SamplingParams, Targets
from uma_trio.lanes import Lane, Pace
from uma_trio.speculation import Speculation
from uma_trio.text.chat import AUTO as AUTO  # these are words of the fronts, too
from uma_trio.text.chat import Call as Call
from uma_trio.text.chat import Message as Message
from uma_trio.text.chat import Mode as Mode
from uma_trio.text.chat import Tool as Tool
from uma_trio.text.chat import ToolChoice as ToolChoice
from uma_trio.text.shape import Shape as Shape
from uma_trio.text.template import PLAINLY
from uma_trio.text.template import Manner as Manner


@frozen
class Chat:
    """A conversation to be rendered by the model's template.

    `manner` is how; its arguments are checked by :meth:`Service.generate`, like everything else.
    `tools` are what the model may ask for, by `choice`.
    """

    messages: tuple[Message, ...]
    manner: Manner = PLAINLY
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO


Prompt = str | Chat | IntArray
"""Text, a conversation, or tokens (int32), which are taken as they are."""


@frozen(kw_only=True, eq=False)
class Ask:
    """One request for text. Nothing of it is checked yet; :meth:`Service.generate` does that.

    `max_tokens` None is the daemon's default, trimmed to the room in the context; with `clamp`
    a larger wish is trimmed as well instead of refused. `model` None is the loaded one.
    `shape` is what the answer has to look like, from its first token on behind the reasoning, which
    gets at most `reasoning_budget` tokens (None: no bound of its own). What was computed for the
    same user before may be used again: with `cache` "private" only for this client, with any other
    text for whoever gives the same (a salt). `speculation` says which guesses at its answer are
    computed ahead, if the daemon computes any. `streamed` says that the tokens are passed on as they
    come, so that the times between them mean something to the metrics. With `pace` "smooth" those of
    an interactive request may be held back so that they come evenly. With `progress` each answer's
    stream is told how much of its prompt is computed. `n` is how many answers, or choices, there are
    to be.
    """

    prompt: Prompt
    sampling: SamplingParams = field(factory=SamplingParams)
    max_tokens: int | None = None
    clamp: bool = False
    stop: tuple[str, ...] = ()
    lane: Lane = "interactive"
    targets: Targets = field(factory=Targets)
    model: str | None = None
    session: str | None = None
    cache: str | None = None
    shape: Shape | None = None
    reasoning_budget: int | None = None
    speculation: Speculation = "auto"
    streamed: bool = True
    pace: Pace = "smooth"
    progress: bool = False
    n: int = 1


@frozen(kw_only=True)
class Door:
    """A way into the daemon: how long a prompt may be that comes by it, set by which option."""

    max_prompt_bytes: int
    option: str = "--max-prompt-bytes"


@frozen(kw_only=True)
class Origin:
    """Who asks. `client` is what fairness counts as one: a process, or whoever holds a key.

    It is the pid where there is one, and otherwise negative. `name` is what the client calls its
    request and `app` what it calls itself; both are labels for people and grant nothing. `uid`
    and `pid` are the kernel's word, None where it gives none.
    """

    client: int
    door: Door
    name: str
    app: str | None = None
    uid: int | None = None
    pid: int | None = None


def user_of(uid: int | None, client: int) -> str:
    """Return what the namespaces of a user begin with: the kernel's word, else the client."""
    return f"client {client}" if uid is None else f"uid {uid}"


def owns(user: str, of: str) -> bool:
    """Whether what is in the namespace `of` is the user's own."""
    return f"{of}/".startswith(f"{user}/")


def namespace(ask: Ask, origin: Origin) -> str | None:
    """Return whose computed beginnings a request may use and adds to: its user's, or narrower.

    The user is the kernel's word; without it nobody shares with another client. None, so that nothing
    is used, where the prompt is scored: what is not computed has no logits.
    """
    if ask.sampling.prompt_logprobs is not None:
        return None
    user = user_of(origin.uid, origin.client)
    if ask.cache is None:
        return user
    if ask.cache == "private":
        return f"{user}/client {origin.client}"
    return f"{user}/salt {ask.cache}"


class Refusal(Exception):
    """The request is not accepted; the engine never knew of it.

    Attributes:
        code: the code of the fault.
        message: one sentence: what is wrong, the bound, what to do.
        field: what of the :class:`Ask` is at fault, if one thing is.
        retry_after_s: when it is worth trying again, if it is.
        prompt_tokens: how long the prompt is, where that is what does not fit.
        context: how long prompt and answer together may be, in the same case.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        prompt_tokens: int | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.prompt_tokens = prompt_tokens
        self.context = context


def seeded(seed: int | None) -> int:
    """Return `seed`, or a fresh one."""
    return random.getrandbits(63) if seed is None else seed


def of_choice(ask: Ask, choice: int) -> Ask:
    """Return what is asked for one choice: the first has the seed, the others each one made of it.

    They are made by a hash, so that requests with seeds in a row have no choice in common.
    """
    if choice == 0:
        return ask
    digest = blake2b(f"{ask.sampling.seed} {choice}".encode(), digest_size=8).digest()
    return evolve(ask, sampling=evolve(ask.sampling, seed=int.from_bytes(digest) >> 1))
