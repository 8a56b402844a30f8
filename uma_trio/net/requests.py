"""From a `generate` request to a :class:`Submit`, or to the refusal that says why not.

Pure but for the seed: no socket, no waiting. The order of the checks is the order of their
cost, so that what is refused is refused before it is tokenised.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from uma_protocol import CODES, Code, Eos, Error, Timings, Usage
from uma_trio.engine.messages import Finished, SamplingParams, Sink, Submit, Targets

if TYPE_CHECKING:
    from uma_protocol import Generate, Slo
    from uma_trio.net.directory import Running
    from uma_trio.net.shared import Prompt, Settings


class Refusal(Exception):
    """The request is not accepted. Nothing but this is said about it."""

    def __init__(self, code: Code, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def error_event(
    code: Code,
    message: str,
    *,
    id: str | None = None,  # noqa: A002
    retry_after_s: float | None = None,
) -> Error:
    """Build the `error` event of a connection on which nothing else runs."""
    info = CODES[code]
    return Error(
        code=code.value,
        message=message,
        # A client that waits only for `eos` or end of file has to see one of them.
        fatal=info.fatality.ends(idle=True),
        retryable=info.retryable,
        id=id,
        retry_after_ms=None if retry_after_s is None else max(1, round(retry_after_s * 1e3)),
    )


def refusal_event(refusal: Refusal, request_id: str) -> Error:
    """Build the event that tells the client about a refusal."""
    return error_event(
        refusal.code, refusal.message, id=request_id, retry_after_s=refusal.retry_after_s
    )


def check_untokenised(generate: Generate, settings: Settings) -> None:
    """Check what can be checked without tokens.

    Raises:
        Refusal: another model, a prompt of too many bytes, more tokens than anybody may ask.
    """
    if generate.model is not None and generate.model != settings.model:
        raise Refusal(
            Code.E_MODEL_002, f"this daemon serves {settings.model}; leave model out, or name that"
        )
    n_bytes = _prompt_bytes(generate)
    if n_bytes > settings.max_prompt_bytes:
        raise Refusal(
            Code.E_LIMIT_001,
            f"the prompt is {n_bytes} bytes long, the daemon takes {settings.max_prompt_bytes}; "
            "shorten it, or raise the daemon's --max-prompt-bytes",
        )
    cap, asked = settings.max_tokens_cap, generate.max_tokens
    if cap is not None and asked is not None and asked > cap:
        raise Refusal(Code.E_PROTO_003, f"max_tokens is {asked}, the daemon gives at most {cap}")


def max_tokens_for(generate: Generate, n_prompt: int, settings: Settings) -> int:
    """Return how many tokens the request may get.

    Raises:
        Refusal: prompt and max_tokens do not fit into the context together.
    """
    room = settings.n_ctx_seq - n_prompt
    asked = generate.max_tokens
    if n_prompt == 0:
        raise Refusal(Code.E_PROTO_003, "the prompt holds no tokens")
    if room < 1:
        raise Refusal(
            Code.E_LIMIT_004,
            f"the prompt has {n_prompt} tokens and leaves no room for an answer in the context of "
            f"{settings.n_ctx_seq}; shorten it to {settings.n_ctx_seq - 1} or fewer",
        )
    if asked is None:
        return min(settings.max_tokens, room)
    if asked > room:
        raise Refusal(
            Code.E_LIMIT_004,
            f"a prompt of {n_prompt} and max_tokens {asked} exceed the context of "
            f"{settings.n_ctx_seq}; at most {room} tokens can follow this prompt",
        )
    return asked


def submit_message(
    running: Running, prompt: Prompt, max_tokens: int, sink: Sink, *, credit: int, client: int
) -> Submit:
    """Translate a request that was found to be sound."""
    generate = running.generate
    seed = generate.seed
    return Submit(
        handle=running.handle,
        prompt=prompt,
        max_tokens=max_tokens,
        params=SamplingParams(
            temperature=generate.temperature,
            top_p=generate.top_p,
            top_k=generate.top_k,
            min_p=generate.min_p,
            seed=random.getrandbits(63) if seed is None else seed,
            ignore_eos=generate.ignore_eos,
        ),
        stop=generate.stop,
        lane=running.lane,
        client=client,
        credit=credit,
        sink=sink,
        submitted=running.arrived,
        targets=_targets(generate.slo),
    )


def _targets(slo: Slo | None) -> Targets:
    if slo is None:
        return Targets()
    ttft, gap = slo.target_ttft_ms, slo.target_tbt_ms
    return Targets(None if ttft is None else ttft / 1e3, None if gap is None else gap / 1e3)


def never_submitted(running: Running, now: float) -> Finished:
    """Describe the end of a request that ended before the engine knew of it."""
    waited = now - running.arrived
    return Finished(
        reason="cancelled" if running.code is None else "error",
        text="",
        prompt_tokens=0,
        completion_tokens=0,
        cached_tokens=0,
        queue_s=waited,
        ttft_s=None,
        total_s=waited,
        code=running.code,
        message=running.message,
    )


def eos_event(running: Running, finished: Finished, text: str | None) -> Eos:
    """Build the terminal event; `text` is what goes out with it."""
    return Eos(
        id=running.generate.id,
        reason=finished.reason,
        usage=Usage(
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
        ),
        timings=_timings(finished),
        request=running.handle,
        text=text,
        code=finished.code,
        message=finished.message,
        metadata=running.generate.metadata,
    )


def _timings(finished: Finished) -> Timings:
    ttft = finished.ttft_s
    # The rate of the stream itself: what came before the first token is `ttft_ms`.
    streaming = finished.total_s - (ttft or 0.0)
    after_first = finished.completion_tokens - 1
    return Timings(
        queue_ms=round(finished.queue_s * 1e3, 3),
        ttft_ms=None if ttft is None else round(ttft * 1e3, 3),
        total_ms=round(finished.total_s * 1e3, 3),
        tokens_per_s=round(after_first / streaming, 3)
        if after_first > 0 and streaming > 0
        else 0.0,
    )


def _prompt_bytes(generate: Generate) -> int:
    if generate.prompt is not None:
        return len(generate.prompt.encode())
    return sum(len(message.content.encode()) for message in generate.messages or ())
