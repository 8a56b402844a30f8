"""Every path that is served, in one table."""

from __future__ import annotations

from functools import cache

from attrs import evolve

from uma_protocol import Generate
from uma_trio.api.anthropic.endpoint import CountTokens, Messages, count_tokens, messages
from uma_trio.api.anthropic.events import reply_to as messages_error
from uma_trio.api.bodies import BodySpec
from uma_trio.api.context import Context, fault_of_refusal
from uma_trio.api.encoders import (
    EMBEDDING,
    EMBEDDINGS,
    OLLAMA_EMBED,
    RERANK,
    embedding,
    embeddings,
    ollama_embed,
    ollama_embeddings,
    rerank,
)
from uma_trio.api.events import events
from uma_trio.api.generate import generate
from uma_trio.api.llama.completion import Completion, completion, completions
from uma_trio.api.llama.server import (
    APPLY_TEMPLATE,
    DETOKENIZE,
    TOKENIZE,
    adapters,
    apply_template,
    detokenize,
    props,
    slots,
    tokenize,
)
from uma_trio.api.ollama.bodies import CHAT, GENERATE
from uma_trio.api.ollama.endpoint import chat as ollama_chat
from uma_trio.api.ollama.endpoint import generate as ollama_generate
from uma_trio.api.ollama.lines import reply_to as ollama_error
from uma_trio.api.ollama.models import SHOW, no_store, ps, root, show, tags, version
from uma_trio.api.openai.chat import ChatCompletions, chat_completions, chat_tokens
from uma_trio.api.openai.completions import Completions
from uma_trio.api.openai.models import NAMED, load, model, models, unload
from uma_trio.api.openapi import openapi
from uma_trio.api.responses.endpoint import (
    Compact,
    Responses,
    compact,
    input_tokens,
    responses,
    stored_response,
)
from uma_trio.api.status import PRIORITY, explain, health, metrics, priority, router_figures
from uma_trio.http.errors import native_error
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.page import page, to_page
from uma_trio.http.router import Handler, Route, Router
from uma_trio.service.ask import Refusal

SOCKET_GENERATE = BodySpec(Generate)


async def openapi_document(exchange: Exchange, context: Context) -> Reply:
    """Return the OpenAPI document of all paths."""
    return Reply(200, _document())


@cache
def _document() -> bytes:
    return openapi(ROUTES)


ROUTES = (
    Route("POST", "/chat/completions", chat_completions, body=ChatCompletions.spec),
    Route("POST", "/chat/completions/input_tokens", chat_tokens, body=ChatCompletions.spec),
    Route("POST", "/completions", completions, body=Completions.spec),
    Route("POST", "/responses", responses, body=Responses.spec),
    Route("POST", "/responses/input_tokens", input_tokens, body=Responses.spec),
    Route("POST", "/responses/compact", compact, body=Compact.spec),
    Route("GET", "/responses/", stored_response),
    Route("POST", "/responses/", stored_response),
    Route("DELETE", "/responses/", stored_response),
    Route("POST", "/messages", messages, errors=messages_error, body=Messages.spec),
    Route(
        "POST", "/messages/count_tokens", count_tokens, errors=messages_error, body=CountTokens.spec
    ),
    Route("GET", "/models", models),
    Route("GET", "/models/", model),
    Route("POST", "/embeddings", embeddings, body=EMBEDDINGS),
    Route("POST", "/embedding", embedding, errors=native_error, body=EMBEDDING),
    Route("POST", "/rerank", rerank, body=RERANK),
    Route("POST", "/reranking", rerank, body=RERANK),
    Route("POST", "/completion", completion, errors=native_error, body=Completion.spec),
    Route("GET", "/health", health, access="open", errors=native_error),
    Route("GET", "/props", props, errors=native_error),
    Route("GET", "/slots", slots, errors=native_error),
    Route("GET", "/lora-adapters", adapters, errors=native_error),
    Route("POST", "/tokenize", tokenize, errors=native_error, body=TOKENIZE),
    Route("POST", "/detokenize", detokenize, errors=native_error, body=DETOKENIZE),
    Route("POST", "/apply-template", apply_template, errors=native_error, body=APPLY_TEMPLATE),
    Route("POST", "/generate", generate, body=SOCKET_GENERATE),
    Route("POST", "/api/chat", ollama_chat, errors=ollama_error, body=CHAT),
    Route("POST", "/api/generate", ollama_generate, errors=ollama_error, body=GENERATE),
    Route("GET", "/api/tags", tags, errors=ollama_error),
    Route("GET", "/api/ps", ps, errors=ollama_error),
    Route("POST", "/api/show", show, errors=ollama_error, body=SHOW),
    Route("GET", "/api/version", version, errors=ollama_error),
    Route("POST", "/api/embed", ollama_embed, errors=ollama_error, body=OLLAMA_EMBED),
    Route("POST", "/api/embeddings", ollama_embeddings, errors=ollama_error, body=OLLAMA_EMBED),
    Route("POST", "/api/pull", no_store, errors=ollama_error),
    Route("POST", "/api/push", no_store, errors=ollama_error),
    Route("POST", "/api/create", no_store, errors=ollama_error),
    Route("POST", "/api/copy", no_store, errors=ollama_error),
    Route("DELETE", "/api/delete", no_store, errors=ollama_error),
    Route("GET", "/", root, access="open", alone=True),
    Route("GET", "/ui", to_page, access="open"),
    Route("GET", "/ui/", page, access="open", whole=True),
    Route("GET", "/openapi.json", openapi_document),
    Route("GET", "/metrics", metrics),
    Route("GET", "/metrics/router", router_figures, access="open"),
    Route("GET", "/events", events, errors=native_error, watches=True),
    Route("GET", "/explain", explain, errors=native_error),
    Route("POST", "/priority", priority, access="own", body=PRIORITY),
    Route("POST", "/load", load, access="operator", body=NAMED),
    Route("POST", "/unload", unload, access="operator", body=NAMED),
    Route("POST", "/models/load", load, access="operator", errors=native_error, body=NAMED),
    Route("POST", "/models/unload", unload, access="operator", errors=native_error, body=NAMED),
)


def router(context: Context) -> Router:
    """Return what finds the handler of a request, bound to `context`."""
    return Router([evolve(route, handler=_bound(route.handler, context)) for route in ROUTES])


def _bound(handler: Handler, context: Context) -> Handler:
    if handler in (page, to_page):
        return handler

    async def handle(exchange: Exchange) -> Reply | None:
        try:
            return await handler(exchange, context)
        except Refusal as refusal:
            raise fault_of_refusal(refusal) from refusal

    return handle
