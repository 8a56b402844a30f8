"""Several models: the section `models` of the settings file, and what each of them is loaded with.

A model has settings of its own for the options in :data:`OF_A_MODEL`; everything else is the daemon's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from uma_trio.config.option import ConfigError, Option, as_written, seconds
from uma_trio.words import nearest

SECTION: Final = "models"
OF_A_MODEL: Final = (
    "model", "n_ctx", "parallel", "kv_layout", "kv_type", "flash_attention", "gpu_layers", "n_cpu_moe", "mlock", "mmap", "max_tokens",
    "chat_template_file", "reasoning", "reply_format", "speculation", "prefix_ram", "session_ttl_s", "lora",
    "lora_contexts",
)  # fmt: skip
"""The options that a model may have for itself, under the same names as in the file."""
_YEAR_S: Final = 31_536_000.0
LOADS: Final = ("start", "on-demand", "explicit")
"""When a model is loaded: with the daemon, when a request names it, or when an operator says so."""
ON_DEMAND: Final = LOADS[1]


@frozen
class ModelSpec:
    """One entry of `models`: what requests call it, its other names, and its settings by the options' fields.

    A `pinned` model is never unloaded for another one, and a `hidden` one is left out of lists. `load` is one of
    :data:`LOADS`, None for the daemon's own. `defaults` are for what requests do not say.
    """

    name: str
    aliases: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(factory=dict)
    load: str | None = None
    ttl_s: float | None = None
    pinned: bool = False
    hidden: bool = False
    defaults: Mapping[str, float] = field(factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it; the first one is shown."""
        return (self.name, *self.aliases)


def read_models(found: object, source: str, options: Sequence[Option]) -> tuple[ModelSpec, ...]:
    """Return the models of the section, in their order; `source` names it in messages. Raises ConfigError."""
    if not isinstance(found, Mapping) or not found:
        why = "takes a model or more, {NAME: {model: FILE, ...}}"
        raise ConfigError(
            f"{source} {why}, and not {as_written(found)}; see `uma-trio help config`"
        )
    known = {one.key: one for one in options if one.name in OF_A_MODEL}
    specs = tuple(_spec(str(name), each, f"{source}.{name}", known) for name, each in found.items())
    check_names(specs)
    return specs


def further_models(paths: Sequence[str]) -> tuple[ModelSpec, ...]:
    """Return the models of a repeated `--model`, each called as its file, or as it was asked for."""
    return tuple(
        ModelSpec(
            Path(text).stem if text.endswith(".gguf") else text,
            settings={"model": Path(text)},
            pinned=True,
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
    missing = f"{source}: model is missing; give it the file, or a name of `uma-trio models`"
    if not isinstance(found, Mapping):
        raise ConfigError(missing)
    settings: dict[str, object] = {}
    own: dict[str, Any] = {}
    for key, raw in found.items():
        where = f"{source}.{key}"
        if (option := known.get(_SPELT.get(str(key), str(key)))) is not None:
            settings[option.name] = option.value(raw, where)
        elif str(key) in _OWN:
            field_name, read = _OWN[str(key)]
            if field_name in own:
                raise ConfigError(f"{where}: load and preload say the same; give one of them")
            own[field_name] = read(raw, where)
        else:
            names = [*known, *_SPELT, *_OWN]
            raise ConfigError(
                f"{source}: no such key {key}{nearest(str(key), names)}; see `uma-trio help config`"
            )
    if "model" not in found:
        raise ConfigError(missing)
    if own.get("pinned") and own.get("ttl_s") is not None:
        raise ConfigError(
            f"{source}: a model with pin stays loaded, and has no ttl; give one of them"
        )
    return ModelSpec(name, settings=settings, **own)


def _load(raw: object, source: str) -> str:
    word = ON_DEMAND if raw == "on-request" else raw
    if word not in LOADS:
        raise ConfigError(
            f"{source}: {as_written(raw)} is not {', '.join(LOADS[:-1])} or {LOADS[-1]}"
        )
    return str(word)


def _preload(raw: object, source: str) -> str:
    return LOADS[0] if _flag(raw, source) else ON_DEMAND


def _flag(raw: object, source: str) -> bool:
    if not isinstance(raw, bool):
        raise ConfigError(f"{source}: {as_written(raw)} is not true or false")
    return raw


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


def _defaults(raw: object, source: str) -> Mapping[str, float]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: {as_written(raw)} is not a map such as {{temperature: 0.7}}")
    from uma_protocol.schema import model_defaults

    known = model_defaults()
    found: dict[str, float] = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(
                f"{source}: no such key {key}{nearest(str(key), [*known])}; it takes {', '.join(known)}"
            )
        if known[key].check(key, value) is not None:
            raise ConfigError(f"{source}.{key}: {as_written(value)} is not {known[key].text}")
        found[key] = value
    return found


_SPELT: Final = {"template": "chat_template_file"}
"""Shorter names of options."""
_OWN: Final[Mapping[str, tuple[str, Callable[[object, str], object]]]] = {
    "aliases": ("aliases", _aliases),
    "load": ("load", _load),
    "preload": ("load", _preload),
    "ttl": ("ttl_s", _ttl),
    "pin": ("pinned", _flag),
    "hidden": ("hidden", _flag),
    "defaults": ("defaults", _defaults),
}
"""The keys that only a model has: the field of :class:`ModelSpec`, and what reads it."""
