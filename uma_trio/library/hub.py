"""Hugging Face's hub, or a mirror of it: what a repository holds, and which of its files to fetch."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from attrs import frozen

from uma_trio.library.hub_cache import expanded, hub_home
from uma_trio.library.reference import DEFAULT_ENDPOINT, MAIN, PullFailed
from uma_trio.library.weights_names import (
    PREFERRED,
    bits_of,
    is_model,
    is_projector,
    part_of,
    quant_of,
    stem_of,
)

_PATIENCE_S: Final = 30.0
_MOST_ANSWER: Final = 64 << 20  # of JSON: the largest repositories list some thousand files
_MOST_PAGES: Final = 100
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
_NEXT: Final = re.compile(r'<([^>]+)>\s*;\s*rel="next"')


@frozen
class HubFile:
    """A file of a repository. `sha256` is "" for a small file, which the hub does not hash so."""

    path: str
    size: int
    sha256: str


@frozen
class WantedFiles:
    """The files of one model: its parts in order, then the projector if one is wanted."""

    quant: str
    files: tuple[HubFile, ...]

    @property
    def n_bytes(self) -> int:
        """How many bytes they have together."""
        return sum(file.size for file in self.files)


def choose(files: Iterable[HubFile], quant: str, *, projector: bool, path: str = "") -> WantedFiles:
    """Choose the files of one model: all parts of it, and its `projector` if that is wanted.

    Without `quant` it is Q4_K_M, else Q8_0, else the first. With one it may be a part of the file's name. `path`
    is a file of the model, or a folder that it is in.

    Raises:
        PullFailed: the repository has no such model, or not all of its parts.
    """
    there = sorted(files, key=lambda file: file.path)
    models: dict[str, list[HubFile]] = {}
    for file in there:
        if is_model(file.path):
            folder = str(PurePosixPath(file.path).parent)
            models.setdefault(f"{folder}/{stem_of(file.path)}", []).append(file)
    if not models:
        raise PullFailed(
            "there is no GGUF file in it; look for a repository whose name ends in -GGUF"
        )
    if path:
        models = _at(models, path)
    stem = _named(models, quant) if quant else _preferred(models)
    parts = models[stem]
    _, count = part_of(parts[0].path)
    if [part_of(file.path)[0] for file in parts] != [*range(1, count + 1)]:
        raise PullFailed(f"it has {len(parts)} of the {count} parts of {parts[0].path}")
    chosen = quant_of(parts[0].path) or stem_of(parts[0].path)
    beside = [file for file in there if is_projector(file.path)] if projector else []
    bits = bits_of(chosen)
    nearest = sorted(beside, key=lambda file: abs(bits_of(quant_of(file.path)) - bits))[:1]
    return WantedFiles(chosen, (*parts, *nearest))


def _at(models: Mapping[str, list[HubFile]], path: str) -> dict[str, list[HubFile]]:
    """Return the model that a file is of, or those in a folder."""
    parts = {stem: [file.path for file in files] for stem, files in models.items()}
    found = {stem: models[stem] for stem, paths in parts.items() if path in paths}
    if not found:
        folder = f"{path.rstrip('/')}/"
        found = {
            stem: models[stem] for stem, (first, *_) in parts.items() if first.startswith(folder)
        }
    if not found:
        others = ", ".join(paths[0] for paths in parts.values())
        raise PullFailed(f"it has no model at {path}; it has {others}")
    return found


def _named(models: Mapping[str, list[HubFile]], quant: str) -> str:
    exact = [stem for stem in models if quant_of(stem) == quant.upper()]
    loose = [stem for stem in models if quant.lower() in PurePosixPath(stem).name.lower()]
    found = exact or loose
    if not found:
        kinds = ", ".join(
            f"{quant_of(stem) or stem_of(stem)} ({sum(file.size for file in parts) / 1e9:.1f} GB)"
            for stem, parts in models.items()
        )
        raise PullFailed(f"it has no {quant}; it has {kinds}")
    return min(found, key=len)


def _preferred(models: Mapping[str, list[HubFile]]) -> str:
    for quant in PREFERRED:
        if fitting := [stem for stem in models if quant_of(stem) == quant]:
            return min(fitting, key=len)
    return next(iter(models))


class Hub:
    """The hub at an endpoint. A token is sent to that host alone, and to no other by a redirect."""

    def __init__(
        self, endpoint: str = DEFAULT_ENDPOINT, token: str = "", token_from: str = ""
    ) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._token = token
        self._token_from = token_from
        self._opener = urllib.request.build_opener(_Redirects())
        self._asker = urllib.request.build_opener(_NoRedirects())

    @classmethod
    def of(cls, env: Mapping[str, str], home: Path) -> Hub:
        """Return the hub that HF_ENDPOINT names, with the token that the hub's own tools would send."""
        return cls(env.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, *_token_of(env, home))

    def files(self, repository: str, revision: str = MAIN) -> list[HubFile]:
        """List a repository. Raises :class:`PullFailed`."""
        url = f"{self.endpoint}/api/models/{repository}/tree/{_quoted(revision)}?recursive=true"
        found: list[HubFile] = []
        for _ in range(_MOST_PAGES):
            with self._open(url, repository) as answer:
                found += _listed(answer.read(_MOST_ANSWER), repository)
                more = _NEXT.search(answer.headers.get("Link", ""))
            if more is None:
                return found
            url = urllib.parse.urljoin(url, more[1])
        raise PullFailed(f"{repository} has too many files to list")

    def commit(self, repository: str, path: str, revision: str = MAIN) -> str:
        """Return the commit that a file is of. Raises :class:`PullFailed`."""
        request = self._request(self.address(repository, path, revision), method="HEAD")
        try:
            with self._asker.open(request, timeout=_PATIENCE_S) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as refusal:
            with refusal:
                if refusal.code >= 400:
                    raise self._explained(refusal, repository) from None
                headers = refusal.headers
        except (OSError, HTTPException) as error:
            raise _unreachable(self.endpoint, error) from None
        commit = headers.get("X-Repo-Commit", "")
        return commit if _COMMIT.fullmatch(commit) else MAIN

    def open(self, repository: str, path: str, begin: int, revision: str = MAIN) -> HTTPResponse:
        """Ask for a file's bytes from `begin` on; the answer's status says whether that was heard.

        Raises:
            PullFailed: it is refused.
            OSError: the connection failed, which may pass.
        """
        ranged = {"Range": f"bytes={begin}-"} if begin else {}
        request = self._request(self.address(repository, path, revision), headers=ranged)
        try:
            answer: HTTPResponse = self._opener.open(request, timeout=_PATIENCE_S)
        except urllib.error.HTTPError as refusal:
            with refusal:
                if refusal.code >= 500 or refusal.code in (408, 416, 429):
                    raise OSError(f"the server answered {refusal.code}") from None
                raise self._explained(refusal, repository) from None
        return answer

    def address(self, repository: str, path: str, revision: str = MAIN) -> str:
        """Return where a file is."""
        quoted = urllib.parse.quote(path)
        return f"{self.endpoint}/{repository}/resolve/{_quoted(revision)}/{quoted}"

    def _open(self, url: str, repository: str) -> HTTPResponse:
        try:
            answer: HTTPResponse = self._opener.open(self._request(url), timeout=_PATIENCE_S)
        except urllib.error.HTTPError as refusal:
            with refusal:
                raise self._explained(refusal, repository) from None
        except (OSError, HTTPException) as error:
            raise _unreachable(self.endpoint, error) from None
        return answer

    def _explained(self, refusal: urllib.error.HTTPError, repository: str) -> PullFailed:
        if refusal.code == 401 and self._token:
            return PullFailed(
                f"the hub does not take the token of {self._token_from or 'this program'}; set another one, or none"
            )
        if refusal.code in (401, 403):
            return PullFailed(
                f"{repository} is not open to everybody, or does not exist; accept its licence on its page, and set"
                " HF_TOKEN or run `hf auth login`"
            )
        if refusal.code == 404:
            return PullFailed(f"there is no {repository} on the hub; check the name")
        return PullFailed(f"the hub answered {refusal.code} {refusal.reason}; try again later")

    def _request(
        self, url: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> urllib.request.Request:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise PullFailed(f"{url} is no web address; check HF_ENDPOINT")
        own = self._token and _same_server(url, self.endpoint)
        keys = {"Authorization": f"Bearer {self._token}"} if own else {}
        about = {"User-Agent": "uma-trio", **keys, **(headers or {})}
        return urllib.request.Request(url, headers=about, method=method)  # noqa: S310 - see the check above


def _quoted(revision: str) -> str:
    return urllib.parse.quote(revision, safe="")


def _token_of(env: Mapping[str, str], home: Path) -> tuple[str, str]:
    """Return the token to send and where it is from, in the order of the hub's own tools; "" if there is none."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := env.get(name, "").strip():
            return _checked(token, name), name
    if env.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "", ""
    path = expanded(env["HF_TOKEN_PATH"], home) if env.get("HF_TOKEN_PATH") else None
    path = path or hub_home(env, home) / "token"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return "", ""
    return _checked(token, str(path)), str(path)


def _checked(token: str, place: str) -> str:
    if re.search(r"[^\x21-\x7e]", token):
        raise PullFailed(f"{place} holds no token, which has letters and digits; set it anew")
    return token


def _same_server(url: str, other: str) -> bool:
    """Whether two addresses lead to one server by one protocol: a token must not go out unencrypted."""
    first, second = urllib.parse.urlsplit(url), urllib.parse.urlsplit(other)
    return (first.scheme, first.netloc.lower()) == (second.scheme, second.netloc.lower())


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token stays behind where they lead to another host or protocol."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if following is not None and not _same_server(newurl, req.full_url):
            following.remove_header("Authorization")
        return following


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: what the hub says of a file is in its own answer."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _listed(text: bytes, repository: str) -> list[HubFile]:
    try:
        entries = json.loads(text)
        files = [entry for entry in entries if entry.get("type", "file") == "file"]
        return [
            HubFile(
                _safe(str(entry["path"]), repository),
                _size(entry),
                _digest(entry.get("lfs") or {}, repository),
            )
            for entry in files
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PullFailed(
            f"the list of {repository}'s files cannot be read; check HF_ENDPOINT"
        ) from None


def _size(entry: Mapping[str, Any]) -> int:
    size = int((entry.get("lfs") or {}).get("size") or entry["size"])
    if size < 0:
        raise ValueError
    return size


def _safe(path: str, repository: str) -> str:
    """Return a path of a repository that stays inside the folder that it is written to."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path or not pure.name:
        raise PullFailed(f"{repository} lists a file at {path!r}, which leads out of its folder")
    return str(pure)


def _digest(lfs: Mapping[str, Any], repository: str) -> str:
    digest = str(lfs.get("oid") or lfs.get("sha256") or "").removeprefix("sha256:")
    if digest and not _SHA256.fullmatch(digest):
        raise PullFailed(f"{repository} gives {digest!r} as a SHA-256; check HF_ENDPOINT")
    return digest


def _unreachable(endpoint: str, error: Exception) -> PullFailed:
    why = getattr(error, "reason", None) or error
    return PullFailed(f"{endpoint} cannot be reached: {why}; check the network, or set HF_ENDPOINT")
