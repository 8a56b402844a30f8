"""Hugging Face's cache folder: where files of the hub lie, so that every program finds them once.

``models--OWNER--REPO/blobs/SHA256`` holds a file, ``snapshots/COMMIT/NAME`` leads to it,
``refs/main`` names the commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import frozen

_FOLDER: Final = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")


def cache_folder(env: Mapping[str, str], home: Path) -> Path:
    """Return the cache, in the order in which llama.cpp and the hub's library look for it."""
    for name in ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := env.get(name):
            return expanded(folder, home)
    return hub_home(env, home) / "hub"


def hub_home(env: Mapping[str, str], home: Path) -> Path:
    """Return the folder of the hub's own tools, which has their cache and the token of `hf auth login`."""
    if folder := env.get("HF_HOME"):
        return expanded(folder, home)
    return expanded(env.get("XDG_CACHE_HOME") or "~/.cache", home) / "huggingface"


def expanded(text: str, home: Path) -> Path:
    """Return a path of a variable, in which ~ stands for the home folder, as the hub's tools read it."""
    path = Path(text)
    return home.joinpath(*path.parts[1:]) if path.parts[:1] == ("~",) else path


@frozen
class CachedRepository:
    """One repository's part of the cache."""

    folder: Path

    @classmethod
    def of(cls, cache: Path, repository: str) -> CachedRepository:
        """Return the part for ``owner/repo``, which need not exist."""
        return cls(cache / f"models--{repository.replace('/', '--')}")

    @property
    def name(self) -> str:
        """The repository as it is written, ``owner/repo``; "" if the folder is none."""
        found = _FOLDER.fullmatch(self.folder.name)
        return f"{found['owner']}/{found['name']}" if found else ""

    def blob(self, digest: str) -> Path:
        """Return where the bytes of a file lie."""
        return self.folder / "blobs" / digest

    def snapshot(self, commit: str) -> Path:
        """Return the folder of the files of a commit."""
        return self.folder / "snapshots" / commit

    def put(self, commit: str, path: str, digest: str) -> Path:
        """Let `path` of a commit lead to a file that is there; return it. Atomic."""
        place = self.snapshot(commit) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(self.blob(digest), place.parent)
        new = place.with_name(f".{place.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(place)
        return place

    def set_ref(self, revision: str, commit: str) -> None:
        """Make a commit that of a revision."""
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f".{ref.name}.{os.getpid()}")
        new.write_text(commit, encoding="ascii")
        new.replace(ref)

    def files(self) -> Iterator[Path]:
        """Yield the files of all commits, those of the current one first.

        A quantisation that was fetched at an earlier commit lies in the folder of that one alone.
        """
        try:
            commit = (self.folder / "refs" / "main").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            commit = ""
        for folder in sorted(self._snapshots(), key=lambda each: each.name != commit):
            yield from sorted(folder.rglob("*.gguf"))

    def _snapshots(self) -> list[Path]:
        try:
            return sorted(path for path in (self.folder / "snapshots").iterdir() if path.is_dir())
        except OSError:
            return []


def cached_repositories(cache: Path) -> list[CachedRepository]:
    """Return every repository in the cache."""
    try:
        folders = sorted(path for path in cache.iterdir() if _FOLDER.fullmatch(path.name))
    except OSError:
        return []
    return [CachedRepository(folder) for folder in folders]
