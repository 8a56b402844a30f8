"""Where settings come from: flag, then environment, then a YAML file, then the default.

The file is the one that is named, or else ``~/.config/uma-trio/config.yaml`` if it exists. Its keys are the flags'
names with underscores; :data:`SECTIONS` has the sectioned keys of the specification. Nothing unknown is ignored: it
is refused with the nearest known name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from uma_trio.config.models import SECTION, ModelSpec, check_names, further_models, read_models
from uma_trio.config.option import ConfigError, Option, as_written, show
from uma_trio.config.options import OPTIONS, Config
from uma_trio.config.place import CONFIG_ENV as CONFIG_ENV
from uma_trio.config.place import CONFIG_FLAG as CONFIG_FLAG
from uma_trio.config.place import ENV_PREFIX, users_file
from uma_trio.sockets.path import default_socket
from uma_trio.words import nearest

if TYPE_CHECKING:
    from yaml.nodes import Node


@frozen
class Reserved:
    """A setting of the specification that has one value: accepted with that, refused otherwise."""

    flag: str | None
    key: str
    accepts: tuple[str, ...]
    because: str

    def check(self, raw: object, source: str) -> None:
        """Raise :class:`ConfigError` unless `raw` is the one value."""
        if str(raw).strip().lower() not in self.accepts:
            raise ConfigError(
                f"{source}: {as_written(raw)} is not available: {self.because}; "
                f"omit it or use {self.accepts[0]}"
            )


_MEASURED: Final = "the policy derives the batch size from measured times"
RESERVED: Final = (
    Reserved(
        "--kv-pack",
        "kv_pack",
        ("default",),
        "llama.cpp stores K by cell, and V by cell or across them; it has no layout by heads",
    ),
    Reserved("--ipc", "ipc", ("uds",), "the Unix domain socket is the only transport"),
    Reserved(None, "ipc.backlog", ("64",), "the listener's backlog is fixed"),
    Reserved(None, "scheduler.max_merge", ("4",), _MEASURED),
    Reserved(None, "scheduler.start_target_tokens", ("32",), _MEASURED),
    Reserved(
        None,
        "scheduler.preempt_at_token",
        ("true", "on"),
        "requests always join between two tokens",
    ),
    Reserved(None, "metrics.tick_interval_ms", ("1000",), "the scorecard is updated every second"),
    Reserved(
        None,
        "qos.background.priority",
        ("1",),
        "qos.interactive.priority is relative to this value",
    ),
)
SECTIONS: Final = {
    "ipc.uds_path": "socket",
    "limits.max_sessions": "max_sessions",
    "limits.max_prompt_bytes": "max_prompt_bytes",
    "limits.max_tokens": "max_tokens_cap",
    "scheduler.tick_budget_ms": "tick_budget_ms",
    "qos.interactive.priority": "interactive_priority",
    "logging.scorecard_interval_s": "scorecard_interval",
    "bmt_budget_gbps": "bmt_budget",
}
"""The keys of the specification, and ours for them."""
_FILES: Final = (
    "socket", "model", "trace", "scorecard", "http_key_file", "http_admin_key_file", "token_file",
)  # fmt: skip
_REMOVED_ENV: Final = {
    "UMA_N_SEQ": "UMA_PARALLEL",
    "UMA_USE_MLOCK": "UMA_MLOCK",
    "UMA_USE_MMAP": "UMA_MMAP",
    "UMA_IDLE_TIMEOUT_SEC": "UMA_IDLE_TIMEOUT",
}


def known_env() -> list[str]:
    """Return every environment variable that is read."""
    return [CONFIG_ENV, *(name for item in OPTIONS for name in item.env)]


def load(flags: Mapping[str, object] | None = None, env: Mapping[str, str] | None = None) -> Config:
    """Join flags, environment and the YAML file they name. Raises :class:`ConfigError`.

    `flags` has the values of flags by :attr:`Option.key`, and of ``config``.
    """
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    env = {name: text for name, text in (os.environ if env is None else env).items() if text}
    _refuse_unknown_env(env)
    _check_reserved(flags)
    path, named_by = _file_of_settings(flags, env)
    file = read_yaml(path, named_by) if path else {}
    models: tuple[ModelSpec, ...] = ()
    if SECTION in file:
        models = read_models(file.pop(SECTION), f"{path}: {SECTION}", OPTIONS)
    asked = flags.get("model")
    if isinstance(asked, tuple):
        flags["model"] = asked[0]
        models += further_models(asked[1:])
    check_names(models)
    found = {item.name: _first(item, flags, env, file, f"{path}: ") for item in OPTIONS}
    sources = {name: source for name, (_, source) in found.items() if source}
    values = {
        item.name: item.value(found[item.name][0], sources[item.name])
        for item in OPTIONS
        if item.name in sources
    }
    if "socket" not in values:
        values["socket"] = Path(default_socket(env))
    config = Config(**values, models=models, sources=sources)  # type: ignore[arg-type]  # structured to its fields' types
    named = {config.source(name): getattr(config, name) for name in _FILES}
    _refuse_one_file_twice({named_by: path, **named})
    return config


def restated(config: Config) -> dict[str, str]:
    """Return the settings that were given, as the flags of :func:`load` that mean the same in any folder.

    What no single text says, as several folders or further models, is left out.
    """
    found = {}
    for item in OPTIONS:
        value = getattr(config, item.name)
        if item.name not in config.sources or value is None:
            continue
        several = isinstance(value, tuple) and len(value) == 1
        one = value[0] if several else value
        if isinstance(one, Path) and one.exists():
            one = one.absolute()
        text, value = show(one), (one,) if several else one
        try:
            is_same = item.value(text, item.flag) == value
        except ConfigError:
            continue
        if is_same:
            found[item.key] = text
    return found


def _file_of_settings(
    flags: Mapping[str, object], env: Mapping[str, str]
) -> tuple[Path | None, str]:
    """Return the YAML file if one is named, or the user's if there is one, and what names it."""
    for path, named_by in ((flags.get("config"), CONFIG_FLAG), (env.get(CONFIG_ENV), CONFIG_ENV)):
        if path:
            return Path(str(path)).expanduser(), named_by
    own = users_file(env)
    return (own, "the settings file") if own is not None and own.is_file() else (None, CONFIG_FLAG)


def _first(
    item: Option,
    flags: Mapping[str, object],
    env: Mapping[str, str],
    file: Mapping[str, object],
    named: str,
) -> tuple[object, str]:
    """Return the value of the highest precedence, and where it was written ("" if nowhere).

    `named` is how the file is named before its keys.
    """
    if item.key in flags:
        return flags[item.key], item.flag
    for name in item.env:
        if name == "UMA_DEBUG" and name in env:
            if env[name].strip().lower() not in {"0", "false", "no", "off"}:
                return "debug", name
        elif name in env:
            return env[name], name
    keys = (item.key, *(key for key, ours in SECTIONS.items() if ours == item.key))
    written = [name for name in keys if name in file]
    if len(written) > 1:
        message = f"{named}{' and '.join(written)} set the same thing; keep one of them"
        raise ConfigError(message)
    return (file[written[0]], named + written[0]) if written else (None, "")


def _refuse_one_file_twice(named: Mapping[str, Path | None]) -> None:
    """Refuse a file that two settings name, which would overwrite it; `named` has the files by their sources."""
    seen: dict[object, str] = {}
    for name, path in named.items():
        if path is None:
            continue
        other = seen.setdefault(_identity(path), name)
        if other != name:
            both = f"{other} and {name}"
            message = f"{both} name the same file, {path}; give each a file of its own"
            raise ConfigError(message)


def _identity(path: Path) -> object:
    try:
        about = path.stat()
    except OSError:
        return path.resolve()
    return about.st_dev, about.st_ino


def _check_reserved(flags: Mapping[str, object]) -> None:
    for item in RESERVED:
        if item.flag and item.key in flags:
            item.check(flags[item.key], item.flag)


def _refuse_unknown_env(env: Mapping[str, str]) -> None:
    """Refuse what looks like a misspelling. Other programs may use the prefix, too."""
    known = known_env()
    for name, instead in _REMOVED_ENV.items():
        if name in env:
            raise ConfigError(
                f"{name}: no such environment variable (did you mean {instead}?); rename it"
            )
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in known:
            continue
        if hint := nearest(name, known, cutoff=0.8):
            message = f"{name}: no such environment variable{hint}; rename or unset it"
            raise ConfigError(message)


def read_yaml(path: Path, named_by: str) -> dict[str, object]:
    """Return the file's settings by dotted key. Raises :class:`ConfigError`.

    `named_by` is the source of the path, for the message if there is no such file.
    """
    import yaml  # here, so that `--help` does not wait for it

    try:
        text = path.read_text(encoding="utf-8")
        if problem := _ambiguity(yaml.compose(text, yaml.SafeLoader), ()):
            raise ConfigError(f"{path}: {problem}")
        document = yaml.safe_load(text)
    except OSError as error:
        message = f"{named_by} {path}: {error.strerror}; check the path"
        raise ConfigError(message) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"{path} is not YAML: {_where(error)}"
        raise ConfigError(message) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        message = f"{path}: expected settings (key: value), found {document!r}"
        raise ConfigError(message)
    return dict(_settings(document, path))


def _where(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}: {problem}"


def _ambiguity(node: Node | None, around: tuple[Node, ...]) -> str:
    """Return what YAML would quietly resolve: a key given twice, a section inside itself."""
    if node is None or isinstance(node.value, str):
        return ""
    line = node.start_mark.line + 1
    if any(node is other for other in around):
        return f"line {line}: a section contains itself"
    seen: dict[str, int] = {}
    for child in node.value:
        key, value = child if isinstance(child, tuple) else (None, child)
        if key is not None and isinstance(key.value, str):
            line = key.start_mark.line + 1
            if key.value in seen:
                return f"{key.value} is in lines {seen[key.value]} and {line}; keep one of them"
            seen[key.value] = line
        if problem := _ambiguity(value, (*around, node)):
            return problem
    return ""


def _settings(document: Mapping[object, object], path: Path) -> Iterator[tuple[str, object]]:
    reserved = {item.key: item for item in RESERVED}
    known = {*(item.key for item in OPTIONS), *SECTIONS, *reserved}
    sections = {key[:at] for key in known for at, letter in enumerate(key) if letter == "."}
    for key, value in _flatten(document, "", sections):
        if key == SECTION or key in known:
            if key in reserved:
                reserved[key].check(value, f"{path}: {key}")
            yield key, value
        elif key in sections:
            inside = ", ".join(
                sorted(k.removeprefix(f"{key}.") for k in known if k.startswith(f"{key}."))
            )
            raise ConfigError(
                f"{path}: {key} takes settings ({inside}), and not {as_written(value)}; see `uma-trio help config`"
            )
        elif (above := key.rpartition(".")[0]) in known - sections:
            raise ConfigError(f"{path}: {above} takes one value, and no settings below it")
        else:
            # As in {policy: deadline,-stairs}, where the comma is YAML's.
            comma = "; a text with a comma needs quotes" if value is None else ""
            hint = _HABITS.get(key) or nearest(key, sorted(known))
            raise ConfigError(f"{path}: no such key {key}{hint}{comma}; see `uma-trio help config`")


_HABITS: Final = {
    "http_port": " (did you mean http?)",
    "port": " (did you mean http?)",
    "ctx_size": " (did you mean n_ctx?)",
    "context": " (did you mean n_ctx?)",
    "context_length": " (did you mean n_ctx?)",
    "num_ctx": " (did you mean n_ctx?)",
    "num_parallel": " (did you mean parallel?)",
    "n_gpu_layers": " (did you mean gpu_layers?)",
}
"""Keys of other programs; the nearest of our keys would be a wrong hint."""


def _flatten(
    node: Mapping[object, object], prefix: str, sections: set[str]
) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name != SECTION:
            yield from _flatten(value, f"{name}.", sections)
        elif not (value is None and name in sections):
            yield name, value
