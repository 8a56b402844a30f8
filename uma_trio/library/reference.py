"""How a model of Hugging Face's hub is named: as people type it, and as addresses of its pages and files say it."""

from __future__ import annotations

import re
import urllib.parse
from typing import Final

from attrs import frozen

from uma_trio.library.weights_names import quant_of

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
MAIN: Final = "main"
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION: Final = re.compile(r"[A-Za-z0-9][\w./-]{0,199}")
_HUB: Final = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)(?:/|$)", re.IGNORECASE
)
_SCHEME: Final = re.compile(r"(?:hf:(?://)?|(https?)://)", re.IGNORECASE)
#: What stands in an address between the repository and the revision: of a file, or of a folder.
_VIEWS: Final = ("blob", "resolve", "raw", "blame", "edit", "tree", "commits", "commit")
#: First parts of addresses of the hub that lead to something else than a model.
_NO_MODELS: Final = frozenset(
    {"api", "blog", "collections", "datasets", "docs", "papers", "spaces"}
)


class PullFailed(Exception):
    """A model cannot be fetched; the message is one sentence for the person in front, with a way out."""


@frozen
class Reference:
    """A model of the hub: its repository, and what of it was named: a quantisation, a file or folder, a revision."""

    repository: str
    quant: str = ""
    path: str = ""
    revision: str = MAIN

    def __str__(self) -> str:
        return f"{self.repository}:{self.quant}" if self.quant else self.repository


def reference(text: str, endpoint: str = DEFAULT_ENDPOINT) -> Reference:
    """Read ``owner/repo``, ``owner/repo:Q4_K_M``, ``owner/repo/FILE.gguf``, or the address of a page or file.

    An address begins with the hub's host or with `endpoint`.

    Raises:
        PullFailed: it is none of these.
    """
    name = _after_host(text.strip(), endpoint)
    name, _, query = name.partition("#")[0].partition("?")
    parts = [urllib.parse.unquote(part) for part in name.split("/") if part]
    # A colon or an @ behind the repository, not one in the name of a file.
    repository, mark, more = _divided("/".join(parts[:2]))
    view, rest = (parts[2], parts[3:]) if parts[2:] and parts[2] in _VIEWS else ("", parts[2:])
    revision = rest.pop(0) if view and rest else MAIN
    shown = urllib.parse.parse_qs(query).get("show_file_info", [""])[
        0
    ]  # the hub's own link to a file
    path = "/".join(rest) or shown
    quant = ""
    if mark == ":" or quant_of(more):
        quant = more.removesuffix(".gguf")
    elif more:
        revision = more
    if not _REPOSITORY.fullmatch(repository) or parts[0].lower() in _NO_MODELS:
        raise PullFailed(
            f"{text!r} names no repository; write owner/repo or owner/repo:QUANT, as in"
            " bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M, or the address of its page or of a file"
        )
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise PullFailed(f"{revision!r} is no name of a revision; omit it to fetch {MAIN!r}")
    return Reference(repository, quant, path, revision)


def is_address(text: str) -> bool:
    """Whether a text begins with the hub's host, or is an address of the web."""
    return bool(_HUB.match(text) or _SCHEME.match(text))


def _after_host(text: str, endpoint: str) -> str:
    own = re.escape(re.sub(r"^https?://", "", endpoint.rstrip("/"), flags=re.IGNORECASE))
    if found := _HUB.match(text) or re.match(rf"(?:https?://)?{own}(?:/|$)", text, re.IGNORECASE):
        return text[found.end() :]
    if (scheme := _SCHEME.match(text)) is None:
        return text
    if scheme[1] is not None:
        raise PullFailed(
            f"{text!r} is on another host than {endpoint}; set HF_ENDPOINT for a mirror of the hub, or fetch the"
            " file by hand and name its path"
        )
    return text[scheme.end() :]


def _divided(text: str) -> tuple[str, str, str]:
    """Return what stands before the first colon or @, that mark, and what is behind it."""
    found = re.search("[:@]", text)
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")
