"""Every path that is served, in one table."""

from __future__ import annotations

from uma_trio.http.generate import generate
from uma_trio.http.llama_completion import completion
from uma_trio.http.llama_server import apply_template, detokenize, props, slots, tokenize
from uma_trio.http.models import model, models, not_served
from uma_trio.http.openai_chat import chat_completions
from uma_trio.http.openai_completions import completions
from uma_trio.http.router import Route, Router
from uma_trio.http.status import health, metrics, priority

ROUTES = (
    Route("POST", "/chat/completions", chat_completions),
    Route("POST", "/completions", completions),
    Route("GET", "/models", models),
    Route("GET", "/models/", model),
    Route("POST", "/embeddings", not_served),
    Route("POST", "/completion", completion, native=True),
    Route("GET", "/health", health, access="open", native=True),
    Route("GET", "/props", props, native=True),
    Route("GET", "/slots", slots, native=True),
    Route("POST", "/tokenize", tokenize, native=True),
    Route("POST", "/detokenize", detokenize, native=True),
    Route("POST", "/apply-template", apply_template, native=True),
    Route("POST", "/generate", generate),
    Route("GET", "/metrics", metrics),
    Route("POST", "/priority", priority, access="admin"),
    Route("POST", "/load", not_served, access="admin"),
    Route("POST", "/unload", not_served, access="admin"),
)


def router() -> Router:
    """Return what finds the handler of a request."""
    return Router(ROUTES)
