"""Names of models: references to Hugging Face's hub, and what the names of GGUF files say."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import PurePosixPath
from typing import Final

from attrs import frozen

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
MAIN: Final = "main"
#: Quantisations in the order in which one is chosen if none is named, as llama.cpp's tools do.
PREFERRED: Final = ("Q4_K_M", "Q8_0")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION: Final = re.compile(r"[A-Za-z0-9][\w./-]{0,199}")
_HUB: Final = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)(?:/|$)", re.IGNORECASE
)
_SCHEME: Final = re.compile(r"(?:hf:(?://)?|(https?)://)", re.IGNORECASE)
#: Path segments between the repository and the revision in an address of a file or folder.
_VIEWS: Final = ("blob", "resolve", "raw", "blame", "edit", "tree", "commits", "commit")
#: First path segments of addresses that do not lead to a model.
_NOT_MODELS: Final = frozenset(
    {"api", "blog", "collections", "datasets", "docs", "papers", "spaces"}
)
_QUANT: Final = re.compile(
    r"(?i)(?:^|[-._])((?:UD-)?(?:I?Q[1-9](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32))(?=[-._]|$)"
)
_PART: Final = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})$")
#: Prefixes of modules that draft tokens for a model. Elsewhere in a name they describe a whole model.
_DRAFTERS: Final = ("mtp-", "eagle3-", "dflash-", "dspark-")


class PullFailed(Exception):
    """A model cannot be downloaded. The message is one sentence that says what to do."""


@frozen
class Reference:
    """A model of the hub: its repository, and a quantisation, file or folder, and revision if named."""

    repository: str
    quant: str = ""
    path: str = ""
    revision: str = MAIN

    def __str__(self) -> str:
        return f"{self.repository}:{self.quant}" if self.quant else self.repository


def reference(text: str, endpoint: str = DEFAULT_ENDPOINT) -> Reference:
    """Parse ``owner/repo``, ``owner/repo:Q4_K_M``, ``owner/repo/FILE.gguf``, or the address of a page or file.

    An address begins with the hub's host or with `endpoint`. Raises :class:`PullFailed`.
    """
    name = _after_host(text.strip(), endpoint)
    name, _, query = name.partition("#")[0].partition("?")
    parts = [urllib.parse.unquote(part) for part in name.split("/") if part]
    # The tag follows the repository; a colon or @ in a file's name is part of that.
    repository, mark, tag = _split_tag("/".join(parts[:2]))
    view, rest = (parts[2], parts[3:]) if parts[2:] and parts[2] in _VIEWS else ("", parts[2:])
    revision = rest.pop(0) if view and rest else MAIN
    (shown, *_) = urllib.parse.parse_qs(query).get("show_file_info", [""])  # the hub's file links
    quant = ""
    if mark == ":" or quant_of(tag):
        quant = tag.removesuffix(".gguf")
    elif tag:
        revision = tag
    if not _REPOSITORY.fullmatch(repository) or parts[0].lower() in _NOT_MODELS:
        raise PullFailed(
            f"{text!r} names no repository; write owner/repo or owner/repo:QUANT, as in"
            " bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M, or the address of its page or of a file"
        )
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise PullFailed(f"{revision!r} is no name of a revision; omit it to fetch {MAIN!r}")
    return Reference(repository, quant, "/".join(rest) or shown, revision)


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
            f"{text!r} is on another host than {endpoint}; set HF_ENDPOINT for a mirror of the hub, or download the"
            " file by hand and name its path"
        )
    return text[scheme.end() :]


def _split_tag(text: str) -> tuple[str, str, str]:
    """Return what precedes the first colon or @, that mark, and what follows it."""
    found = re.search("[:@]", text)
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")


def quant_of(name: str) -> str:
    """Return the quantisation in the name of a GGUF file, in capitals; "" if it names none."""
    found = _QUANT.findall(stem_of(name))
    return found[-1].upper() if found else ""


def stem_of(name: str) -> str:
    """Return the name of a GGUF file without folder, suffix and part number."""
    stem = PurePosixPath(name).name.removesuffix(".gguf")
    part = _PART.match(stem)
    return part["stem"] if part else stem


def part_of(name: str) -> tuple[int, int]:
    """Return the part number of a GGUF file and the number of parts; (1, 1) if it is not split."""
    part = _PART.match(PurePosixPath(name).name.removesuffix(".gguf"))
    return (int(part["no"]), int(part["count"])) if part else (1, 1)


def is_model(name: str) -> bool:
    """Whether a file is a model or a part of one by its name, not a projector, draft module or imatrix."""
    last = PurePosixPath(name).name.lower()
    other = "mmproj" in last or last.startswith(_DRAFTERS) or _is_imatrix(last)
    return last.endswith(".gguf") and not other


def _is_imatrix(last: str) -> bool:
    # A model that was quantised with an importance matrix names its quantisation, too.
    stem = stem_of(last)
    is_data = stem.startswith("imatrix") or stem.endswith(".imatrix") or not quant_of(last)
    return "imatrix" in stem and is_data
