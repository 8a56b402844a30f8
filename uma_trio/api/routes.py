"""Every path that is served, in one table."""

from __future__ import annotations

from uma_trio.api.anthropic.endpoint import count_tokens, messages
from uma_trio.api.anthropic.errors import reply_to as messages_error
from uma_trio.api.embeddings import embedding, embeddings, ollama_embed, ollama_embeddings
from uma_trio.api.events import events
from uma_trio.api.explain import explain
from uma_trio.api.generate import generate
from uma_trio.api.llama.completion import completion, completions
from uma_trio.api.llama.server import (
    adapters,
    apply_template,
    detokenize,
    props,
    slots,
    tokenize,
)
from uma_trio.api.ollama.endpoint import chat as ollama_chat
from uma_trio.api.ollama.endpoint import generate as ollama_generate
from uma_trio.api.ollama.errors import reply_to as ollama_error
from uma_trio.api.ollama.models import no_store, ps, root, show, tags, version
from uma_trio.api.openai.chat import chat_completions, chat_tokens
from uma_trio.api.openai.models import load, model, models, unload
from uma_trio.api.rerank import rerank
from uma_trio.api.responses.endpoint import compact, input_tokens, responses, stored_response
from uma_trio.api.status import health, metrics, priority, router_figures
from uma_trio.http.errors import native_error
from uma_trio.http.page import page, to_page
from uma_trio.http.router import Route, Router

ROUTES = (
    Route("POST", "/chat/completions", chat_completions),
    Route("POST", "/chat/completions/input_tokens", chat_tokens),
    Route("POST", "/completions", completions),
    Route("POST", "/responses", responses),
    Route("POST", "/responses/input_tokens", input_tokens),
    Route("POST", "/responses/compact", compact),
    Route("GET", "/responses/", stored_response),
    Route("POST", "/responses/", stored_response),
    Route("DELETE", "/responses/", stored_response),
    Route("POST", "/messages", messages, errors=messages_error),
    Route("POST", "/messages/count_tokens", count_tokens, errors=messages_error),
    Route("GET", "/models", models),
    Route("GET", "/models/", model),
    Route("POST", "/embeddings", embeddings),
    Route("POST", "/embedding", embedding, errors=native_error),
    Route("POST", "/rerank", rerank),
    Route("POST", "/reranking", rerank),
    Route("POST", "/completion", completion, errors=native_error),
    Route("GET", "/health", health, access="open", errors=native_error),
    Route("GET", "/props", props, errors=native_error),
    Route("GET", "/slots", slots, errors=native_error),
    Route("GET", "/lora-adapters", adapters, errors=native_error),
    Route("POST", "/tokenize", tokenize, errors=native_error),
    Route("POST", "/detokenize", detokenize, errors=native_error),
    Route("POST", "/apply-template", apply_template, errors=native_error),
    Route("POST", "/generate", generate),
    Route("POST", "/api/chat", ollama_chat, errors=ollama_error),
    Route("POST", "/api/generate", ollama_generate, errors=ollama_error),
    Route("GET", "/api/tags", tags, errors=ollama_error),
    Route("GET", "/api/ps", ps, errors=ollama_error),
    Route("POST", "/api/show", show, errors=ollama_error),
    Route("GET", "/api/version", version, errors=ollama_error),
    Route("POST", "/api/embed", ollama_embed, errors=ollama_error),
    Route("POST", "/api/embeddings", ollama_embeddings, errors=ollama_error),
    Route("POST", "/api/pull", no_store, errors=ollama_error),
    Route("POST", "/api/push", no_store, errors=ollama_error),
    Route("POST", "/api/create", no_store, errors=ollama_error),
    Route("POST", "/api/copy", no_store, errors=ollama_error),
    Route("DELETE", "/api/delete", no_store, errors=ollama_error),
    Route("GET", "/", root, access="open", alone=True),
    Route("GET", "/ui", to_page, access="open"),
    Route("GET", "/ui/", page, access="open", whole=True),
    Route("GET", "/metrics", metrics),
    Route("GET", "/metrics/router", router_figures, access="open"),
    Route("GET", "/events", events, errors=native_error, watches=True),
    Route("GET", "/explain", explain, errors=native_error),
    Route("POST", "/priority", priority, access="own"),
    Route("POST", "/load", load, access="operator"),
    Route("POST", "/unload", unload, access="operator"),
    Route("POST", "/models/load", load, access="operator", errors=native_error),
    Route("POST", "/models/unload", unload, access="operator", errors=native_error),
)


def router() -> Router:
    """Return what finds the handler of a request."""
    return Router(ROUTES)
