"""Requests and their origins, independent of sockets and wire formats.

Each front end translates its requests into an :class:`Ask` and an :class:`Origin`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from attrs import evolve, field, frozen

from uma_protocol.requests import GenerateOptions
from uma_protocol.schema import model_defaults
from uma_trio.engine.messages import SamplingParams, Targets
from uma_trio.models.refusal import Refusal as Refusal
from uma_trio.sockets.principal import Principal
from uma_trio.text.chat import AUTO as AUTO
from uma_trio.text.chat import Call as Call
from uma_trio.text.chat import Message as Message
from uma_trio.text.chat import Mode as Mode
from uma_trio.text.chat import Tool as Tool
from uma_trio.text.chat import ToolChoice as ToolChoice
from uma_trio.text.frontend import Chat as Chat  # re-exported for the front ends
from uma_trio.text.frontend import Prompt as Prompt
from uma_trio.text.shape import Shape as Shape
from uma_trio.text.template import Manner as Manner
from uma_trio.text.tokeniser import TextOwner
from uma_trio.words import Awaits, Lane, Pace, Speculation
from uma_trio.words import chosen as chosen


@frozen
class Salt:
    """A text: requests of one principal share cached prefixes if they have the same salt."""

    text: str


Sharing = Literal["user", "private", "none"] | Salt
"""Which requests of its principal share cached prefixes and drafts with a request: see `Ask.cache`."""


def explicit_of(options: GenerateOptions) -> dict[str, Any]:
    """Return the sampling options that a client set itself, of those for which a model may have defaults."""
    found = {name: getattr(options, name) for name in model_defaults()}
    return {name: value for name, value in found.items() if value is not None}


def sampling_of(options: GenerateOptions, base: SamplingParams) -> SamplingParams:
    """Return the sampling parameters; those that the client did not set are from `base`."""
    seed = None if options.seed is None or options.seed < 0 else options.seed
    if options.default_temperature is not None:
        base = evolve(base, temperature=options.default_temperature)
    return evolve(
        base,
        **explicit_of(options),
        seed=seeded(seed),
        seed_named=seed is not None,
        ignore_eos=options.ignore_eos,
        min_tokens=options.min_tokens,
        stop_token_ids=tuple(options.stop_token_ids),
    )


def adapters_of(options: GenerateOptions) -> list[dict[str, object]] | None:
    """Return the LoRA adapters that a request names, as in llama-server's list; None where it names none."""
    if options.lora is None:
        return None
    found: list[dict[str, object]] = msgspec.to_builtins(options.lora)
    return found


def speculation_of(options: GenerateOptions) -> Speculation:
    return chosen(options.speculation, seeded=options.seed is not None and options.seed >= 0)


@frozen(kw_only=True, eq=False)
class Ask:
    """One request for text, unchecked; :meth:`Service.generate` checks it.

    - `max_tokens` None means the daemon's default, reduced to the room in the context. With `clamp`
      a larger number is reduced, too, instead of refused.
    - `model` None means the loaded model. `lora` are the adapters of it that are used, as in llama-server's list; None: as
      `model` says.
    - `shape` constrains the answer after its reasoning. `reasoning_budget` limits the reasoning
      (None: no separate limit).
    - `cache` says which of the principal's requests share cached prefixes with this one: "user",
      all; "private", those of the same process (of the same connection where the process is
      unknown); a salt, those with the same salt; "none", no other request, and it leaves nothing:
      only its own choices share the prompt while they are computed.
    - `speculation` restricts speculative decoding.
    - `streamed`: tokens are sent one by one, so the metrics count the gaps between them.
    - With `pace` "smooth" the tokens of an interactive request may be held to be sent at even
      intervals.
    - `awaits` is what the client waits for; None: derived from the request (:func:`awaits_of`).
    - With `progress` the stream of each answer reports the progress of its prompt.
    - `n` is the number of answers (choices).
    - `explicit` are the sampling options that the client set itself: a model's own values replace only the others.
    """

    prompt: Prompt
    sampling: SamplingParams = field(factory=SamplingParams)
    max_tokens: int | None = None
    clamp: bool = False
    stop: tuple[str, ...] = ()
    lane: Lane = "interactive"
    targets: Targets = field(factory=Targets)
    model: str | None = None
    lora: Sequence[Mapping[str, object]] | None = None
    session: str | None = None
    cache: Sharing = "user"
    shape: Shape | None = None
    reasoning_budget: int | None = None
    speculation: Speculation = "auto"
    streamed: bool = True
    pace: Pace = "smooth"
    awaits: Awaits | None = None
    progress: bool = False
    n: int = 1
    explicit: frozenset[str] = frozenset()

    def with_defaults(self, defaults: Mapping[str, float]) -> Ask:
        """Return the request with the model's values for parameters that the client did not set."""
        found: dict[str, Any] = {k: v for k, v in defaults.items() if k not in self.explicit}
        return evolve(self, sampling=evolve(self.sampling, **found)) if found else self


def awaits_of(ask: Ask) -> Awaits:
    """Return what the client of an interactive request waits for: its tokens, or the whole answer.

    Tokens are read one by one. An answer that is not streamed, or is parsed, checked or compared as a whole, is used
    at its end.
    """
    if ask.awaits in ("tokens", "answer"):
        return ask.awaits
    calls = isinstance(ask.prompt, Chat) and bool(ask.prompt.tools)
    whole = not ask.streamed or ask.shape is not None or ask.n > 1 or calls
    return "answer" if whole else "tokens"


@frozen(kw_only=True)
class Door:
    """A front end's longest prompt, and the option that sets it."""

    max_prompt_bytes: int
    option: str = "--max-prompt-bytes"


@frozen(kw_only=True)
class Origin:
    """The client of a request. All rights and shares follow from `principal`.

    `name` is the client's name for the request and `app` its name for itself. They are labels for
    people; `app` also divides the machine time of the principal.
    """

    principal: Principal
    door: Door
    name: str
    app: str | None = None


def namespace(ask: Ask, origin: Origin, together: int) -> str | None:
    """Return the namespace of cached prefixes that an answer reads and extends.

    It is its principal's, or narrower. With `cache` "none" only the answers to one prompt of a request
    have it; `together` is their number. None means that the cache is neither read nor written: the prompt is scored, and cached tokens
    have no logits.
    """
    principal = origin.principal
    if ask.sampling.prompt_logprobs is not None:
        return None
    if ask.cache == "none":
        return f"{principal.shares_as}/request {together}"
    if ask.cache == "user":
        return principal.shares_as
    if ask.cache == "private":
        return f"{principal.shares_as}/{principal.process}"
    return f"{principal.shares_as}/salt {ask.cache.text}"


def text_owner(ask: Ask, origin: Origin) -> TextOwner | None:
    """Return the owner of a request's texts in the cache of tokens, shared as cached prefixes are; None: not cached."""
    shared = None if ask.cache == "none" else namespace(ask, origin, 0)
    return None if shared is None else TextOwner(origin.principal.shares_as, shared)


def seeded(seed: int | None) -> int:
    """Return `seed`, or a random seed."""
    return random.getrandbits(63) if seed is None else seed


def of_choice(ask: Ask, choice: int) -> Ask:
    """Return the request for one choice: choice 0 has the seed, the others have derived seeds.

    Seeds are derived by a hash, so requests with consecutive seeds have no choice in common.
    """
    if choice == 0:
        return ask
    digest = blake2b(f"{ask.sampling.seed} {choice}".encode(), digest_size=8).digest()
    return evolve(ask, sampling=evolve(ask.sampling, seed=int.from_bytes(digest) >> 1))
