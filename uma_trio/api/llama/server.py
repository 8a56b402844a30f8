"""What llama-server tells of itself and of texts: /props, /slots, /tokenize and their like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Final

import msgspec
from attrs import evolve

from uma_protocol.requests import about, text
from uma_trio import __version__
from uma_trio.api.bodies import (
    BeginsAnswer,
    BodySpec,
    ContinueFinal,
    Kwargs,
    MessagesField,
    Model,
    ReasoningEffort,
    Tools,
    decode,
    decode_body,
    free,
    ignored_header,
    run,
    take,
    would_be_ignored,
)
from uma_trio.api.chats import messages_of
from uma_trio.api.context import Context
from uma_trio.api.llama.completion import Completion
from uma_trio.api.llama.settings import generation_settings
from uma_trio.api.openai.chat import manner_of
from uma_trio.api.prompts import MANY, ids_of, written_ids, written_pieces, written_text
from uma_trio.api.tools import reshaped_header, tools_of
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Headers, Reply
from uma_trio.service.ask import Chat, Refusal
from uma_trio.service.checks import utf8_length
from uma_trio.service.preparing import render
from uma_trio.sockets.principal import Principal
from uma_trio.text.derivation import Derivation

_MAX_PIECES = 262_144
_ANY_SEED = 0xFFFFFFFF  # llama-server's word for a fresh one for each request


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A text to tokenise."""

    model: Model = None
    content: Annotated[str, text("the text", 0)]
    add_special: Annotated[bool, about("adds the model's begin-of-text token")] = False
    parse_special: Annotated[
        bool,
        about("parses special tokens: `<|im_end|>` becomes a control token; default true"),
    ] = True
    with_pieces: Annotated[
        bool,
        about(f"returns each token with its text; takes a content of up to {_MAX_PIECES} bytes"),
    ] = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens to return as text."""

    model: Model = None
    tokens: Annotated[Any, free("up to the context", "a list of token ids")]


class ApplyTemplateBody(msgspec.Struct, frozen=True, kw_only=True):
    """A chat to render."""

    model: Model = None
    messages: MessagesField
    tools: Tools = []
    chat_template_kwargs: Kwargs = {}
    reasoning_effort: ReasoningEffort = None
    continue_final_message: ContinueFinal = False
    add_generation_prompt: BeginsAnswer = None


TOKENIZE: Final = BodySpec(TokenizeBody)
DETOKENIZE: Final = BodySpec(DetokenizeBody)
APPLY_TEMPLATE: Final = BodySpec(ApplyTemplateBody)


async def props(exchange: Exchange, context: Context) -> Reply:
    """Return what clients need to know of a model, `?model=` or the default one; nothing about the machine."""
    served = context.of(exchange.head.query.get("model")).served
    with context.using_loaded(served):
        derived = await served.derivation()
    own: dict[str, Any] = dict(served.defaults)
    return _json(
        {
            "default_generation_settings": {
                "n_ctx": served.bounds.n_ctx_seq,
                "params": generation_settings(
                    evolve(Completion.defaults, **own), n_predict=served.bounds.max_tokens
                )
                | {"seed": _ANY_SEED},
            },
            "total_slots": served.slots,
            "model_alias": served.bounds.model,
            # Its file without the folders, which are nobody's business; clients take a name from it.
            "model_path": PurePath(served.facts.path).name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": served.facts.chat_template or "",
            "chat_template_caps": _caps(derived),
            "build_info": f"uma-trio {__version__}",
            "is_sleeping": False,
        }
    )


def _caps(found: Derivation | None) -> dict[str, Any]:
    chats = found is not None
    calls = None if found is None else found.format.calls
    return {
        "supports_tools": chats,
        "supports_tool_calls": calls is not None,
        "supports_parallel_tool_calls": calls is not None,
        "supports_system_role": chats,
        "supports_reasoning": found is not None and found.can_reason,
        "supports_preserve_reasoning": found is not None and bool(found.habits.reasoning_key),
        "tools_in_template": found is not None and found.renders_tools,
        "reply_format": None if found is None else found.format.name,
    }


async def slots(exchange: Exchange, context: Context) -> Reply:
    """List the slots, of `?model=` or all, without any text; of other users' requests only that there are some."""
    named = exchange.head.query.get("model")
    found: list[dict[str, Any]] = []
    if named is not None:
        return _json(await _slots_of(context.of(named), exchange.principal, 0))
    ended: Refusal | None = None
    for each in context.each():
        try:
            found += await _slots_of(each, exchange.principal, len(found))
        except Refusal as refusal:  # it is unloaded, and has no slots any more
            ended = refusal
    if ended is not None and not found and not context.service.models.can_swap:
        raise ended
    return _json(found)


async def _slots_of(context: Context, viewer: Principal, first: int) -> list[dict[str, Any]]:
    served, observer = context.served, context.service.observer
    n_ctx = served.bounds.n_ctx_seq
    seen = observer.viewer(viewer).requests(await observer.state_of(served))
    live = [one for one in seen if one.record.state != "queued"]
    found: list[dict[str, Any]] = [
        {
            "id": first + index,
            "id_task": one.record.handle,
            "n_ctx": n_ctx,
            "is_processing": True,
            "state": one.record.state,
            "lane": one.record.lane,
            "app": one.named.app,
            "n_prompt_tokens": one.record.prompt_tokens,
            "next_token": [{"n_decoded": one.record.completion_tokens}],
        }
        for index, one in enumerate(live)
    ]
    idle = range(len(live), served.slots)
    return [
        *found,
        *({"id": first + i, "n_ctx": n_ctx, "is_processing": False} for i in idle),
    ]


async def adapters(exchange: Exchange, context: Context) -> Reply:
    """List the LoRA adapters of a model (`?model=`), by the numbers that `lora` of a body has. Requests that name none use none."""
    known = context.service.models.resolve(exchange.head.query.get("model")).known_adapters
    found = [
        {"id": n, "name": one.name, "path": one.path.name, "scale": 0.0, "default_scale": one.scale}
        for n, one in enumerate(known)
    ]
    return _json(found)


async def tokenize(exchange: Exchange, context: Context) -> Reply:
    """Return the tokens of a text."""
    body = await decode_body(exchange, context, TOKENIZE)
    exchange.expect_document()
    async with context.using(body.model) as context:
        return await _tokenized(body, context)


async def _tokenized(body: TokenizeBody, context: Context) -> Reply:
    content, pieces = body.content, body.with_pieces
    most = _MAX_PIECES if pieces else context.settings.max_prompt_bytes
    if len(content) > most or utf8_length(content) > most:
        why = f"has more than {most} bytes; send less at once"
        raise Fault(413, f"content {why}", code="prompt_too_large", param="content")
    tokens = await context.served.tokenize(
        content,
        add_special=body.add_special,
        parse_special=body.parse_special,
    )

    def write() -> bytes:
        return written_pieces(tokens, context.served) if pieces else written_ids(tokens)

    return Reply(
        200, await run(context, write, in_thread=len(tokens) > (MANY if not pieces else 256))
    )


async def detokenize(exchange: Exchange, context: Context) -> Reply:
    """Return the text of tokens."""
    body = await decode_body(exchange, context, DETOKENIZE, context.limits(with_ids=True))
    exchange.expect_document()
    async with context.using(body.model) as context:
        return await _detokenized(body, context)


async def _detokenized(body: DetokenizeBody, context: Context) -> Reply:
    value, served = body.tokens, context.served
    most = max(served.bounds.n_ctx_seq, context.settings.body_values)
    if isinstance(value, list) and len(value) > most:
        raise invalid("tokens", f"has {len(value)} tokens; at most {most} are taken at once")

    def write() -> bytes:
        return written_text(ids_of(value, "tokens"), served, context.settings.max_body_bytes)

    many = isinstance(value, list) and len(value) > MANY
    return Reply(200, await run(context, write, in_thread=many))


async def apply_template(exchange: Exchange, context: Context) -> Reply:
    """Return a chat as the model's chat template renders it."""

    def read(document: Mapping[str, Any]) -> tuple[Chat, str | None, Headers]:
        body, ignored = decode(APPLY_TEMPLATE, document, strict=context.settings.strict)
        tools = tools_of(body.tools)
        manner = manner_of(
            kwargs=body.chat_template_kwargs,
            effort=body.reasoning_effort,
            continues=body.continue_final_message,
            begins=body.add_generation_prompt,
        )
        unused = [*ignored]

        def ignore(name: str) -> None:
            if context.settings.strict:
                raise would_be_ignored(name)
            unused.append(name)

        chat = Chat(messages_of(body.messages, ignore), manner, tools)
        return chat, body.model, ignored_header(unused)

    chat, named, headers = (await take(exchange, context, read)).value
    exchange.expect_document(headers)
    async with context.using(named) as context:
        prompt = await render(context.served, chat)
    headers = (*headers, *reshaped_header(prompt.reshaped))
    return Reply(200, msgspec.json.encode({"prompt": prompt.text}), headers=headers)


def _json(document: object) -> Reply:
    return Reply(200, msgspec.json.encode(document))
