"""What Ollama's API tells of models and of the server, and what of it is not served."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from uma_protocol.requests import label
from uma_trio import __version__
from uma_trio.api.bodies import BodySpec, decode_body
from uma_trio.api.context import Context
from uma_trio.api.ollama.bodies import required_model, tagged
from uma_trio.api.openai.models import CAPABILITIES, listed, not_loaded, shown
from uma_trio.backend.base import ModelFacts
from uma_trio.http.errors import Fault
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.page import is_browser, to_page
from uma_trio.models.model import Model


class ShowBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request to describe a model."""

    model: Annotated[str, label("the model; default the first", aliases=("name",))] | None = None


SHOW: Final = BodySpec(ShowBody, ignored=("verbose", "system", "template", "options"))

# Clients ask for a least version: the one whose /api/chat, /api/generate and /api/show are these.
_VERSION: Final = "0.12.11"
_UNKNOWN: Final = "1970-01-01T00:00:00Z"
_CENTURY_S: Final = 3.2e9
_NEVER: Final = "9999-12-31T23:59:59Z"
_MOST_CHARACTERS: Final = 256  # of a value that is told of a model
# As llama.cpp describes the types of weights: "qwen2 1B Q4_K - Medium".
_QUANTISED: Final = re.compile(r"\b(I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32)\b(?: - ([SML])[a-z]+)?")
_NUMBER: Final = re.compile(r"-?\d{1,18}(\.\d{1,18})?")


async def tags(exchange: Exchange, context: Context) -> Reply:
    """List the models, loaded ones once under each name that the operator gave them, with a tag."""
    named = [(each, name) for each in shown(context) for name in listed(each)]
    loaded = [_entry(name, each) for each, name in named]
    absent = [_absent(each) for each in not_loaded(context)]
    return _json({"models": [*loaded, *absent]})


async def ps(exchange: Exchange, context: Context) -> Reply:
    """List the loaded models, and until when each stays if nobody asks it."""
    return _json(
        {
            "models": [
                _entry(each.served.bounds.model, each)
                | {"expires_at": _until(each), "context_length": each.served.bounds.n_ctx_seq}
                for each in shown(context)
            ]
        }
    )


def _until(context: Context) -> str:
    """Return when a model is unloaded, which is never unless it has a time to live."""
    model = context.service.models.resolve(context.served.bounds.model)
    expires_s = model.expires_s if context.service.models.can_swap else None
    if expires_s is None:
        return _NEVER
    until = datetime.now(UTC) + timedelta(seconds=min(expires_s, _CENTURY_S))
    return until.isoformat(timespec="seconds").replace("+00:00", "Z")


async def show(exchange: Exchange, context: Context) -> Reply:
    """Describe a model: its template, its figures, and what it can do. One that is not loaded is not loaded for this."""
    named = (await decode_body(exchange, context, SHOW)).model
    # Of a single model `required_model` refuses other names, as Ollama does.
    models = context.service.models
    model = models.resolve(named, exact=context.settings.strict and models.can_swap)
    if model.wait_reason:
        facts = await model.facts()
        can = [CAPABILITIES[model.kind]]
        can += ["tools"] if facts.chat_template and model.kind == "text" else []
        n_ctx = model.n_ctx or facts.n_ctx_train
        return _json(_described(facts, n_ctx, can) | {"modified_at": _UNKNOWN})
    context = context.of(named)
    required_model(named, context)
    served = context.served
    with context.using_loaded(served):
        derived = await served.derivation()
    can = [CAPABILITIES[served.kind]]
    if derived is not None:
        can += ["tools", "thinking"] if derived.can_reason else ["tools"]
    described = _described(served.facts, served.bounds.n_ctx_seq, can)
    return _json(described | {"modified_at": _since(context)})


def _described(facts: ModelFacts, n_ctx: int, can: list[str]) -> dict[str, Any]:
    return {
        "modelfile": "",
        "parameters": "",
        "template": facts.chat_template or "",
        "details": _details(facts),
        "model_info": _figures(facts, n_ctx),
        "capabilities": can,
    }


async def version(exchange: Exchange, context: Context) -> Reply:
    """Name the version of Ollama whose API is served, and the daemon's own."""
    return _json({"version": _VERSION, "server": f"uma-trio {__version__}"})


async def root(exchange: Exchange, context: Context) -> Reply:
    """Say that the daemon is running; a browser is sent to the page."""
    if is_browser(exchange):
        return await to_page(exchange)
    return Reply(200, b"uma-trio is running\n", content_type="text/plain; charset=utf-8")


async def no_store(exchange: Exchange, context: Context) -> Reply:
    """Answer 400: the daemon changes no models; `uma-trio pull` fetches them."""
    why = "the daemon changes no models; see uma-trio pull and uma-trio models"
    raise Fault(400, why, code="not_supported")


def _entry(name: str, context: Context) -> dict[str, Any]:
    info = context.served.facts
    model = context.service.models.resolve(context.served.bounds.model)
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _since(context),
        "size": info.size_bytes,
        "digest": _digest(model.path),
        "details": _details(info),
    }


def _absent(model: Model) -> dict[str, Any]:
    """Return a configured model that is not loaded: little is known of it."""
    name = tagged(model.names[0])
    details = {**details_of({}, "", 0), "parameter_size": ""}
    known = {"size": model.size, "digest": _digest(model.path), "details": details}
    return {"name": name, "model": name, "modified_at": _UNKNOWN, **known}


def _since(context: Context) -> str:
    return datetime.fromtimestamp(context.started, UTC).isoformat().replace("+00:00", "Z")


def _digest(path: str) -> str:
    """Return what tells a model from others, loaded or not; reading the file for its digest would take a minute."""
    return hashlib.sha256(path.encode("utf-8", "replace")).hexdigest()


def _details(facts: ModelFacts) -> dict[str, Any]:
    return details_of(facts.metadata, facts.description, facts.n_params)


def details_of(metadata: Mapping[str, str], description: str, n_params: int) -> dict[str, Any]:
    """Return what kind of model it is, as far as its file says."""
    family = metadata.get("general.architecture", "")
    found = _QUANTISED.search(description)
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _counted(n_params),
        "quantization_level": "_".join(filter(None, found.groups())) if found else "",
    }


def _figures(info: ModelFacts, n_ctx: int) -> dict[str, Any]:
    family = info.metadata.get("general.architecture", "") or "model"
    return figures_of(info.metadata, family) | {
        "general.architecture": family,
        "general.parameter_count": info.n_params,
        f"{family}.context_length": n_ctx,
        f"{family}.embedding_length": info.n_embd,
    }


def figures_of(metadata: Mapping[str, str], family: str) -> dict[str, Any]:
    """Return what a model's file says of it in general and of its family, as far as it is short."""
    return {
        name: _number(text) if name != "general.name" else text
        for name, text in metadata.items()
        if name.startswith(("general.", f"{family}.")) and len(text) <= _MOST_CHARACTERS
    }


def _number(text: str) -> int | float | str:
    """Return the number that a text is, or else the text."""
    if not _NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)


def _counted(n: int) -> str:
    """Return a number of parameters as people write it."""
    if n >= 1_000_000_000:
        return f"{n / 1e9:.1f}B"
    return f"{n / 1e6:.2f}M" if n >= 1_000_000 else f"{n / 1e3:.0f}K"


def _json(document: object) -> Reply:
    return Reply(200, msgspec.json.encode(document))
