"""Files that flags of `uma-trio run` name: texts, schemas, tools."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import Any

from uma_trio.config.errors import ConfigError

_TOOLS = '[{"name": ..., "description": ..., "parameters": a JSON Schema}, ...]'


def text_of(file: Path) -> str:
    """Return what a file says. Raises :class:`ConfigError`."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start})") from error


def json_of(file: Path) -> Any:
    """Return the JSON value in a file. Raises :class:`ConfigError`."""
    text = text_of(file)
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error


def tools_of(file: Path) -> tuple[dict[str, Any], ...]:
    """Return the tools in a file: a list of functions, by themselves or as OpenAI's API has them.

    Raises :class:`ConfigError`.
    """
    found = json_of(file)
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{file} is not a list of tools: write {_TOOLS}")
    return tuple(_tool(file, place, tool) for place, tool in enumerate(found))


def _tool(file: Path, place: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{file}: [{place}] is not a function with a name: write it as in {_TOOLS}"
        )
    names = ("name", "description", "parameters", "strict")
    return {name: function[name] for name in names if function.get(name) is not None}
