"""Translates between protocol events and the service's types. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from attrs import evolve

from uma_protocol import (
    CODES,
    Alternative,
    CallPiece,
    Code,
    End,
    Eos,
    Error,
    Logprobs,
    MemoryInfo,
    ModelInfo,
    Prefixes,
    PrefixInfo,
    SessionInfo,
    Timings,
    Token,
    ToolCall,
    Usage,
)
from uma_trio.engine.messages import (
    Finished,
    SamplingParams,
    Targets,
    TokenLogprobs,
    TokenOut,
)
from uma_trio.observe.figures import PrefixFigures
from uma_trio.observe.records import PrefixReport
from uma_trio.service.ask import (
    Ask,
    Call,
    Chat,
    Door,
    Manner,
    Message,
    Origin,
    Refusal,
    Salt,
    Shape,
    Sharing,
    Tool,
    ToolChoice,
    adapters_of,
    explicit_of,
    sampling_of,
    speculation_of,
)
from uma_trio.text.replies import (
    Arguments,
    CallStart,
    Content,
    Event,
    ParsedReply,
    Reasoning,
    collect,
)
from uma_trio.text.slices import json_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import uma_protocol
    from uma_protocol import Generate, Slo
    from uma_trio.observe.view import RequestView, State
    from uma_trio.service.generation import Generation
    from uma_trio.service.service import Service
    from uma_trio.sockets.principal import Principal


_DIGITS = 5  # of a logarithmic probability; logits are less exact


def ask_of(generate: Generate) -> Ask:
    """Translate a `generate` request, whose fields the codec has validated."""
    return Ask(
        prompt=generate.prompt or "" if generate.messages is None else _chat(generate),
        sampling=_sampling(generate),
        explicit=frozenset(explicit_of(generate)),
        shape=_shape(generate),
        max_tokens=generate.max_tokens,
        stop=generate.stop,
        lane=generate.priority,
        targets=_targets(generate.slo),
        model=generate.model,
        lora=adapters_of(generate),
        session=generate.session,
        cache=_sharing(generate.cache),
        reasoning_budget=generate.reasoning_budget,
        speculation=speculation_of(generate),
        pace=generate.pace,
        awaits=generate.awaits,
        streamed=generate.stream,
        n=generate.n,
    )


def _sharing(cache: str | None) -> Sharing:
    if cache is None:
        return "user"
    return "private" if cache == "private" else Salt(cache)


def _chat(generate: Generate) -> Chat:
    return Chat(
        tuple(map(_message, generate.messages or ())),
        Manner(
            continue_final=generate.continue_final_message,
            arguments=generate.chat_template_kwargs,
            effort=generate.reasoning_effort,
        ),
        tuple(
            Tool(tool.name, tool.description, tool.parameters, tool.strict)
            for tool in generate.tools
        ),
        ToolChoice(generate.tool_choice, generate.allowed_tools, generate.parallel_tool_calls),
    )


def _message(message: uma_protocol.Message) -> Message:
    return Message(
        message.role,
        message.content,
        tuple(Call(call.id, call.name, call.arguments) for call in message.calls),
        message.call_id,
        message.name,
        message.reasoning or "",
    )


class AnswerEvents:
    """The protocol events of one answer: a token at a time, and its end."""

    def __init__(self, generate: Generate, generation: Generation) -> None:
        self._asked = generate
        self._id = generate.id
        self._streams = generate.stream
        self._choice, self._handle = generation.choice, generation.handle
        self._reading = generation.reading
        self._kept: list[Event] = []  # all of a whole answer, of a stream its calls

    def token(self, item: TokenOut, text_of: Callable[[int], str]) -> Token:
        """Return the event of a token."""
        logprobs = logprobs_of(item.logprobs, text_of)
        if self._reading.plain:
            return Token(self._id, item.text, item.token_id, logprobs, choice=self._choice)
        events = self._reading.token(item)
        self._keep(events)
        reply = collect(event for event in events if isinstance(event, Content | Reasoning))
        calls = tuple(piece for event in events if (piece := _piece(event)) is not None)
        return Token(
            self._id,
            reply.content,
            item.token_id,
            logprobs,
            reply.reasoning or None,
            calls,
            self._choice,
        )

    def keep(self, item: TokenOut) -> None:
        """Keep a token of an answer that is sent as a whole."""
        self._keep(self._reading.token(item))

    def end(self, finished: Finished) -> ParsedReply:
        """Return the reply that the terminal event carries: held back text, or all text; and all calls."""
        events = self._reading.end(finished)
        self._keep(events)
        whole = collect(self._kept)
        if not self._streams:
            return whole
        rest = collect(event for event in events if isinstance(event, Content | Reasoning))
        return ParsedReply(rest.content, rest.reasoning, whole.calls)

    def last(self, finished: Finished, reply: ParsedReply | None) -> End | Eos:
        """Build the terminal event; `reply` is the text and the calls that it carries, if any.

        The only answer ends its request with it.
        """
        if self._asked.n == 1:
            return eos_event(self._asked, self._handle, finished, reply)
        return End(
            id=self._id,
            reason=finished.reason,
            completion_tokens=finished.completion_tokens,
            request=self._handle,
            text=_text(self._asked, reply),
            code=finished.code,
            message=finished.message,
            reasoning=None if reply is None else reply.reasoning or None,
            calls=() if reply is None else _calls(reply),
            choice=self._choice,
        )

    def _keep(self, events: Iterable[Event]) -> None:
        if not self._streams:
            self._kept += events
        elif not self._reading.plain:
            self._kept += [e for e in events if isinstance(e, CallStart | Arguments)]


def _piece(event: Event) -> CallPiece | None:
    if isinstance(event, CallStart):
        return CallPiece(event.index, event.id, event.name)
    return CallPiece(event.index, arguments=event.text) if isinstance(event, Arguments) else None


def _shape(generate: Generate) -> Shape | None:
    """Return what the answer has to look like; the codec has seen to it that there is one at most."""
    if generate.schema is not None:
        return Shape("schema", json_text(generate.schema))
    if generate.regex is not None:
        return Shape("regex", generate.regex, "regex")
    if generate.grammar is not None:
        return Shape("grammar", generate.grammar, "grammar")
    if generate.choice:
        return Shape("choice", json_text(generate.choice), "choice")
    return None


#: The temperature of a request for several answers where neither it nor the model names one: at 0 all of them are equal.
#: llama.cpp's default, see tools/server/README.md there.
_SEVERAL_TEMPERATURE: Final = 0.8


def _sampling(generate: Generate) -> SamplingParams:
    several = SamplingParams(temperature=_SEVERAL_TEMPERATURE)
    return evolve(
        sampling_of(generate, several if generate.n > 1 else SamplingParams()),
        logit_bias=tuple(generate.logit_bias.items()),
        logprobs=generate.logprobs,
    )


def logprobs_of(found: TokenLogprobs | None, text_of: Callable[[int], str]) -> Logprobs | None:
    """Translate the logprobs of a token; `text_of` returns the text of a token id."""
    if found is None:
        return None
    return Logprobs(
        round(found.logprob, _DIGITS),
        tuple([Alternative(token, text_of(token), round(p, _DIGITS)) for token, p in found.top]),
    )


def origin_of(generate: Generate, principal: Principal, door: Door) -> Origin:
    """Return the origin of a request."""
    return Origin(principal=principal, door=door, name=generate.id, app=generate.app)


def error_event(
    code: Code,
    message: str,
    *,
    id: str | None = None,  # noqa: A002
    retry_after_s: float | None = None,
    idle: bool = True,
) -> Error:
    """Build an `error` event of a connection; `idle`: no other request runs on it."""
    info = CODES[code]
    return Error(
        code=code.value,
        message=message,
        # A client that waits only for `eos` or end of file has to see one of them.
        fatal=info.fatality.ends(idle=idle),
        retryable=info.retryable,
        id=id,
        retry_after_ms=None if retry_after_s is None else max(1, round(retry_after_s * 1e3)),
    )


def refusal_event(refusal: Refusal, request_id: str | None, *, idle: bool = True) -> Error:
    """Build the error event of a refusal, as :func:`error_event` does."""
    return error_event(
        refusal.code,
        refusal.message,
        id=request_id,
        retry_after_s=refusal.retry_after_s,
        idle=idle,
    )


def eos_event(
    generate: Generate, handle: int, finished: Finished, reply: ParsedReply | None
) -> Eos:
    """Build the terminal event; `reply` is the text and the calls that it carries, if any."""
    return Eos(
        id=generate.id,
        reason=finished.reason,
        usage=Usage(
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
        ),
        timings=_timings(finished),
        request=handle,
        text=_text(generate, reply),
        code=finished.code,
        message=finished.message,
        metadata=generate.metadata,
        reasoning=None if reply is None else reply.reasoning or None,
        calls=() if reply is None else _calls(reply),
    )


def _text(generate: Generate, reply: ParsedReply | None) -> str | None:
    """Return the text of an event that ends an answer: a whole answer has one, if an empty one."""
    if reply is None:
        return None
    return reply.content or None if generate.stream else reply.content


def _calls(reply: ParsedReply) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.id, call.name, call.arguments) for call in reply.calls)


def session_info(seen: RequestView) -> SessionInfo:
    """Describe a running request."""
    record, named = seen.record, seen.named
    user = named.principal
    return SessionInfo(
        request=record.handle,
        id=named.name or "",
        app=named.app,
        pid=None if user is None else user.pid,
        uid=None if user is None else user.uid,
        state=record.state,
        lane=record.lane,
        awaits=record.awaits,
        prompt_tokens=record.prompt_tokens,
        computed_tokens=record.computed_tokens,
        completion_tokens=record.completion_tokens,
        tokens_per_s=round(record.tokens_per_s, 3),
        age_ms=round(seen.age_s * 1e3, 3),
        ahead_ms=round(record.ahead_s * 1e3, 3),
        choice=named.choice,
        cached_tokens=record.cached_tokens,
        waits=seen.waits,
        model=named.model,
    )


def memory_info(state: State) -> MemoryInfo:
    """Describe the KV caches of all models, and the cached prefixes."""
    cells, kept = state.cells, state.prefixes or PrefixFigures()
    return MemoryInfo(
        cells_used=cells.used,
        cells_reserved=cells.reserved,
        cells_total=cells.total,
        leaves=kept.leaves,
        leaf_tokens=kept.leaf_tokens,
        pages=kept.pages,
        page_bytes=kept.bytes,
    )


_ORDER: Final[Sequence[str]] = ("text", "vectors", "scores")


def models_info(service: Service) -> tuple[ModelInfo, ...]:
    """Describe the models, those that write first."""
    found = [
        ModelInfo(
            name=model.names[0],
            state=model.state,
            progress=round(model.progress, 3),
            gives=model.kind,
            size_bytes=model.size if model.loaded is None else model.loaded.facts.size_bytes,
            n_ctx=model.n_ctx if model.loaded is None else model.loaded.bounds.n_ctx_seq,
        )
        for model in service.models.models
        if not model.is_hidden
    ]
    return tuple(sorted(found, key=lambda one: _ORDER.index(one.gives)))


def prefixes_event(report: PrefixReport, user: str) -> Prefixes:
    """Describe what the prefix cache has of a user."""
    return Prefixes(
        budget_bytes=report.budget,
        used_bytes=report.n_bytes,
        prefixes=tuple(
            PrefixInfo(
                cache=found.namespace.removeprefix(user).removeprefix("/") or None,
                pages=found.pages,
                tokens=found.tokens,
                bytes=found.n_bytes,
                leaf_tokens=found.leaf_tokens,
                sessions=found.sessions,
                asked_tokens=found.asked,
                cached_tokens=found.there,
                missed_tokens=found.missed,
            )
            for found in report.namespaces
        ),
        dropped=report.dropped,
        disk_budget_bytes=report.disk_budget,
        disk_used_bytes=report.disk_bytes,
        disk_bytes=report.own_disk_bytes,
    )


def _targets(slo: Slo | None) -> Targets:
    if slo is None:
        return Targets()
    ttft, gap = slo.target_ttft_ms, slo.target_tbt_ms
    return Targets(None if ttft is None else ttft / 1e3, None if gap is None else gap / 1e3)


def _timings(finished: Finished) -> Timings:
    ttft = finished.ttft_s
    # The rate of the stream after its first token; the time before is `ttft_ms`.
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
