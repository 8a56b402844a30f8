"""Several models: the section `models` of the settings file, and what each of them is loaded with.

A model has settings of its own for the options in :data:`OF_A_MODEL`; everything else is the daemon's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import field, frozen

from uma_trio.config.option import ConfigError, Option, as_written, seconds
from uma_trio.spelling import nearest

SECTION: Final = "models"
OF_A_MODEL: Final = (
    "model", "n_ctx", "parallel", "kv_type", "flash_attention", "gpu_layers", "mlock", "mmap", "max_tokens",
    "chat_template_file", "reasoning", "reply_format", "speculation", "prefix_ram", "session_ttl_s",
)  # fmt: skip
"""The options that a model may have for itself, under the same names as in the file."""
_ALIASES: Final = "aliases"
_LOAD: Final = "load"
_ON_REQUEST: Final = "on-request"
_AT_START: Final = "start"
_TTL: Final = "ttl"
_YEAR_S: Final = 31_536_000.0


@frozen
class ModelSpec:
    """One entry of `models`: what requests call it, its other names, and its settings by the options' fields."""

    name: str
    aliases: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(factory=dict)
    on_request: bool = False
    ttl_s: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it; the first one is shown."""
        return (self.name, *self.aliases)


def read_models(found: object, source: str, options: Sequence[Option]) -> tuple[ModelSpec, ...]:
    """Return the models of the section, in their order; `source` names it in messages. Raises ConfigError."""
    if not isinstance(found, Mapping) or not found:
        why = "takes a model or more, {NAME: {model: FILE, ...}}"
        raise ConfigError(f"{source} {why}, and not {as_written(found)}; see docs/MODELS.md")
    known = {key: one for one in options if one.name in OF_A_MODEL for key in one.keys}
    specs = tuple(_spec(str(name), each, f"{source}.{name}", known) for name, each in found.items())
    check_names(specs)
    return specs


def further_models(paths: Sequence[str]) -> tuple[ModelSpec, ...]:
    """Return the models of a repeated `--model`, each called as its file, or as it was asked for."""
    return tuple(
        ModelSpec(
            Path(text).stem if text.endswith(".gguf") else text, settings={"model": Path(text)}
        )
        for text in paths
    )


def check_names(specs: Sequence[ModelSpec]) -> None:
    """Refuse two models of the same name. Raises ConfigError."""
    seen: dict[str, str] = {}
    for spec in specs:
        for name in spec.names:
            if seen.setdefault(name, spec.name) != spec.name or spec.names.count(name) > 1:
                message = (
                    f"two models are called {name}; give each a name of its own under `models`"
                )
                raise ConfigError(message)
    if len({spec.name for spec in specs}) < len(specs):
        raise ConfigError(
            "two models have the same name; give each a name of its own under `models`"
        )


def _spec(name: str, found: object, source: str, known: Mapping[str, Option]) -> ModelSpec:
    if isinstance(found, str):
        found = {"model": found}
    if not isinstance(found, Mapping) or "model" not in found:
        raise ConfigError(
            f"{source}: model is missing; give it the file, or a name of `uma-trio models`"
        )
    aliases: tuple[str, ...] = ()
    settings: dict[str, object] = {}
    on_request, ttl_s = False, None
    for key, raw in found.items():
        if key == _LOAD:
            on_request = _word(raw, f"{source}.{key}") == _ON_REQUEST
            continue
        if key == _TTL:
            ttl_s = _ttl(raw, f"{source}.{key}")
            continue
        if key == _ALIASES:
            aliases = _aliases(raw, f"{source}.{key}")
            continue
        option = known.get(str(key))
        if option is None:
            names = [*known, _ALIASES, _LOAD, _TTL]
            raise ConfigError(
                f"{source}: no such key {key}{nearest(str(key), names)}; see docs/MODELS.md"
            )
        settings[option.name] = option.value(raw, f"{source}.{key}")
    return ModelSpec(name, aliases, settings, on_request, ttl_s)


def _word(raw: object, source: str) -> str:
    if raw not in (_AT_START, _ON_REQUEST):
        raise ConfigError(f"{source}: {as_written(raw)} is not {_AT_START} or {_ON_REQUEST}")
    return str(raw)


def _ttl(raw: object, source: str) -> float:
    try:
        found = float(str(seconds(raw)))
    except ValueError:
        found = -1.0
    if not 1.0 <= found <= _YEAR_S:
        raise ConfigError(
            f"{source}: {as_written(raw)} is not a time of 1 second or more, such as 10m"
        )
    return found


def _aliases(raw: object, source: str) -> tuple[str, ...]:
    every = [str(one).strip() for one in (raw if isinstance(raw, list) else [raw])]
    if not all(every) or isinstance(raw, dict):
        raise ConfigError(f"{source}: {as_written(raw)} is not a name or a list of names")
    return tuple(every)
