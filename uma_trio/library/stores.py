"""The models that are on this machine already, wherever a program has put them. Nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from uma_trio.library.hub_cache import cache_folder, cached_repositories
from uma_trio.library.weights_names import is_model, part_of, quant_of, stem_of
from uma_trio.words import one_line

_MOST_MANIFEST: Final = 1 << 20
_MOST_FILES: Final = 10_000
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA_MODEL: Final = "application/vnd.ollama.image.model"
_OLLAMA_REGISTRY: Final = "registry.ollama.ai"
# Where Ollama's installer for Linux keeps the models of its service.
_OLLAMA_SERVICE: Final = Path("/usr/share/ollama/.ollama/models")


@frozen
class Found:
    """A model on this machine: how it is called, which program keeps it, and its first file."""

    name: str = field(converter=one_line)
    source: str
    path: Path


def models_here(folders: Iterable[Path], env: Mapping[str, str], home: Path) -> list[Found]:
    """Return every model in `folders`, the hub's cache, Ollama's store and LM Studio's folder.

    A name that two of them have is kept for the first; the other is called by its path.
    """
    found: list[Found] = []
    for folder in folders:
        found += _in_folder(folder)
    found += _in_hub_cache(cache_folder(env, home))
    for store in _ollama_stores(env, home):
        found += _in_ollama(store)
    for folder in (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"):
        found += _in_lm_studio(folder)
    return _distinct(found)


def _distinct(found: Iterable[Found]) -> list[Found]:
    names: set[str] = set()
    paths: set[Path] = set()
    kept = []
    for model in found:
        real = model.path.resolve()
        if real in paths:
            continue
        paths.add(real)
        name = model.name if model.name not in names else str(model.path)
        names.add(name)
        kept.append(Found(name, model.source, model.path))
    return kept


def _in_folder(folder: Path) -> Iterator[Found]:
    """Yield the models of a folder and of the folders in it, called by their files."""
    for path in _gguf_files(folder, ("*.gguf", "*/*.gguf")):
        yield Found(stem_of(path.name), str(folder), path)


def _in_lm_studio(folder: Path) -> Iterator[Found]:
    for path in _gguf_files(folder, ("*/*/*.gguf",)):
        owner, repository = path.parts[-3:-1]
        yield Found(_with_quant(f"{owner}/{repository}", path.name), "lmstudio", path)


def _in_hub_cache(cache: Path) -> Iterator[Found]:
    for repository in cached_repositories(cache):
        for path in repository.files():
            if _is_first(path):
                yield Found(_with_quant(repository.name, path.name), "hf", path)


def _with_quant(repository: str, file: str) -> str:
    return f"{repository}:{quant_of(file) or stem_of(file)}"


def _gguf_files(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    seen = 0
    for pattern in patterns:
        try:
            for path in sorted(folder.glob(pattern)):
                seen += 1
                if seen > _MOST_FILES:
                    return
                if _is_first(path):
                    yield path
        except OSError:
            continue


def _is_first(path: Path) -> bool:
    """Whether it is there, and a model or the first part of one."""
    try:
        return is_model(path.name) and part_of(path.name)[0] == 1 and path.is_file()
    except OSError:
        return False


def _ollama_stores(env: Mapping[str, str], home: Path) -> tuple[Path, ...]:
    if folder := env.get("OLLAMA_MODELS"):
        return (Path(folder),)
    return (home / ".ollama" / "models", _OLLAMA_SERVICE)


def _in_ollama(store: Path) -> Iterator[Found]:
    """Yield the models that manifests name: ``manifests/HOST/NAMESPACE/MODEL/TAG``."""
    root = store / "manifests"
    try:
        manifests = sorted(path for path in root.glob("*/*/*/*") if path.is_file())
    except OSError:
        return
    for manifest in manifests[:_MOST_FILES]:
        blob = _ollama_blob(store, manifest)
        if blob is not None:
            yield Found(_ollama_name(*manifest.parts[-4:]), "ollama", blob)


def _ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    """Return a model's name as `ollama list` shows it."""
    own = f"{namespace}/" if namespace != "library" else ""
    elsewhere = f"{host}/" if host != _OLLAMA_REGISTRY else ""
    return f"{elsewhere}{own}{model}:{tag}"


def _ollama_blob(store: Path, manifest: Path) -> Path | None:
    """Return the file of a manifest's model, there or not; None if the manifest names none."""
    try:
        with manifest.open("rb") as file:
            document: Any = json.loads(file.read(_MOST_MANIFEST))
        layers = [each for each in document["layers"] if each.get("mediaType") == _OLLAMA_MODEL]
        digest = _DIGEST.fullmatch(str(layers[0]["digest"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return None if digest is None else store / "blobs" / f"sha256-{digest[1]}"
