"""``/v1/models``, and loading and unloading of the models that are configured."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from uma_protocol.requests import label
from uma_trio.api.bodies import BodySpec, decode_body
from uma_trio.api.context import Context
from uma_trio.http.errors import Fault
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.models.model import Model
from uma_trio.words import Gives


class ModelName(msgspec.Struct, frozen=True):
    """The body of a request about one model."""

    model: Annotated[str, label("a name of a configured model")]


NAMED: Final = BodySpec(ModelName)

CAPABILITIES: Final[Mapping[Gives, str]] = {
    "text": "completion",
    "vectors": "embedding",
    "scores": "rerank",
}
"""What Ollama and llama-server call what a model does."""


_UNKNOWN: Final = "1970-01-01T00:00:00Z"


async def models(exchange: Exchange, context: Context) -> Reply:
    """List the models, loaded ones once under each name that the operator gave them."""
    named = [(each, name) for each in shown(context) for name in listed(each)]
    if _is_anthropics(exchange):
        named = [(each, name) for each, name in named if each.served.kind == "text"]
        entries = [_entry(each, name) for each, name in named]
        ids: list[str | None] = [name for _, name in named]
        ids = ids or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1]}
        return _json({"data": entries, **ends, "has_more": False})
    models = [_model(each, name) for each, name in named]
    models += [_unloaded(one) for one in not_loaded(context)]
    return _json(
        {"object": "list", "data": models, "models": [_native(each) for each in shown(context)]}
    )


async def model(exchange: Exchange, context: Context) -> Reply:
    """Describe a model, loaded or not. The only one has any name; a strict daemon answers 404 to other names."""
    _, _, name = exchange.head.path.partition("/models/")
    found = context.service.models.resolve(name, exact=context.settings.strict)
    if found.wait_reason:
        if _is_anthropics(exchange):
            return _json(_anthropic(name, found.n_ctx, _UNKNOWN))
        return _json({**_unloaded(found), "id": name})
    context = context.of(name)
    bounds = context.served.bounds
    if context.settings.strict and not bounds.names(name):
        problem = f"this daemon serves {bounds.model} and nothing else"
        raise Fault(404, problem, code="model_not_found", param="model")
    if _is_anthropics(exchange):
        return _json(_entry(context, name))
    return _json(_model(context, name))


async def load(exchange: Exchange, context: Context) -> Reply:
    """Load a configured model; the answer comes when it is loaded. A client that disconnects ends the loading for no other."""
    named = (await decode_body(exchange, context, NAMED)).model
    exchange.expect_document()
    return _json({"success": True, "model": await context.service.models.load(named)})


async def unload(exchange: Exchange, context: Context) -> Reply:
    """Unload a configured model that no request has; the answer comes when its memory is free."""
    named = (await decode_body(exchange, context, NAMED)).model
    exchange.expect_document()
    return _json({"success": True, "model": await context.service.models.unload_by_name(named)})


def not_loaded(context: Context) -> list[Model]:
    """Return the configured models that are not in memory, without the hidden ones."""
    every = context.service.models.models
    return [model for model in every if model.loaded is None and not model.is_hidden]


def _unloaded(model: Model) -> dict[str, Any]:
    state = "unloaded" if model.is_unloading else model.state
    status: dict[str, Any] = {"value": state}
    if state == "loading":
        status |= {"progress": round(model.progress, 3), "detail": model.wait_reason}
    if state == "failed":
        status |= {"failed": True, "detail": model.wait_reason}
    return {
        "id": model.names[0],
        "object": "model",
        "created": 0,
        "owned_by": "uma-trio",
        "aliases": list(model.names[1:]),
        "capabilities": [CAPABILITIES[model.kind]],
        "status": status,
    }


def _is_anthropics(exchange: Exchange) -> bool:
    """Whether a client of Anthropic's API asks, which has this path, too."""
    return "anthropic-version" in exchange.head.headers


def _entry(context: Context, name: str) -> dict[str, Any]:
    """Return a model as Anthropic's API lists it."""
    created = datetime.fromtimestamp(context.started, UTC).isoformat().replace("+00:00", "Z")
    return _anthropic(name, context.served.bounds.n_ctx_seq, created)


def _anthropic(name: str, context: int, created: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "max_input_tokens": context,
        "max_tokens": context,
        "capabilities": None,
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
    }


def shown(context: Context) -> list[Context]:
    """Return what is shared for each loaded model that is not hidden."""
    return [
        each
        for each in context.each()
        if each.served.is_alive
        and not each.service.models.resolve(each.served.bounds.model).is_hidden
    ]


def listed(context: Context) -> list[str]:
    """Return the names to list: those given by the operator, or that of the model's file."""
    bounds = context.served.bounds
    return [*bounds.configured] or [bounds.model]


def _model(context: Context, name: str) -> dict[str, Any]:
    served = context.served
    info = served.facts
    every = (served.bounds.model, *served.bounds.aliases)
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "uma-trio",
        "aliases": [other for other in every if other != name],
        "capabilities": [CAPABILITIES[served.kind]],
        "status": {"value": "loaded"},
        "max_model_len": served.bounds.n_ctx_seq,
        "defaults": dict(served.defaults),
        "meta": {
            "n_ctx": served.bounds.n_ctx_seq,
            "n_ctx_train": info.n_ctx_train,
            "n_vocab": info.n_vocab,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.size_bytes,
        },
    }


def _native(context: Context) -> dict[str, Any]:
    """Return a model as llama-server lists it, with what Ollama calls its capabilities."""
    name = context.served.bounds.model
    can = CAPABILITIES[context.served.kind]
    return {"name": name, "model": name, "type": "model", "capabilities": [can]}


def _json(document: object) -> Reply:
    return Reply(200, msgspec.json.encode(document))
