"""Models on this machine, wherever a program has put them, and what a typed name means. Reads only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from uma_trio.library.names import (
    PREFERRED,
    PullFailed,
    is_address,
    is_model,
    part_of,
    quant_of,
    reference,
    stem_of,
)
from uma_trio.words import nearest, one_line

BUNDLED: Final = "storyteller"
"""The name of the model in the package."""
_SOURCES: Final = ("hf", "ollama", "lmstudio")
_MOST_MANIFEST: Final = 1 << 20
_MOST_FILES: Final = 10_000
_MOST_SHOWN: Final = 8
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_HUB_FOLDER: Final = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")
_OLLAMA_MODEL: Final = "application/vnd.ollama.image.model"
_OLLAMA_REGISTRY: Final = "registry.ollama.ai"
_OLLAMA_SERVICE: Final = Path("/usr/share/ollama/.ollama/models")  # of its installer for Linux


@frozen
class Found:
    """A model on this machine: its name, the program that keeps it, and its first file."""

    name: str = field(converter=one_line)
    source: str
    path: Path


class NoSuchModel(Exception):
    """No model has that name. The message is one sentence with the nearest, and how to get one."""


def models_here(
    folders: Iterable[Path], env: Mapping[str, str], home: Path, bundled: Path | None = None
) -> list[Found]:
    """Return every model in `folders`, the hub's cache, Ollama's store, LM Studio's folder, and the `bundled` one.

    Of two models with one name the first keeps it, and the other is named by its path.
    """
    found: list[Found] = []
    for folder in folders:
        found += _in_folder(folder)
    found += _in_hub_cache(cache_folder(env, home))
    for store in _ollama_stores(env, home):
        found += _in_ollama(store)
    for folder in (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"):
        found += _in_lm_studio(folder)
    if bundled is not None:
        found.append(Found(BUNDLED, "bundled", bundled))
    return _distinct(found)


def model_file(typed: str, here: Callable[[], Iterable[Found]]) -> Path:
    """Return the file of a model that was named by its path, or as `uma-trio models` lists it.

    A path wins, also a missing one if it looks like a path: it ends in .gguf, or begins with a dot, a slash
    or ~. ``hf:``, ``ollama:`` and ``lmstudio:`` before a name choose the program that keeps it.

    Raises:
        NoSuchModel: it is neither; it is a folder; there is no such file.
    """
    path = Path(typed).expanduser()
    looks_like_one = typed.lower().endswith(".gguf") and not is_address(typed)
    if looks_like_one or typed.startswith((".", "/", "~")) or path.exists():
        return _existing(path)
    source, _, name = typed.partition(":")
    if source not in _SOURCES:
        source, name = "", typed
    found = [model for model in here() if source in ("", model.source)]
    matching = matching_models(name, found) or _at_address(typed, found)
    if matching:
        return matching[0].path
    hint = nearest(name, [model.name for model in found], cutoff=0.5)
    get = f"fetch it with `uma-trio pull {name}`" if "/" in name else "name a GGUF file"
    raise NoSuchModel(
        f"There is no model {typed!r} here{hint}; `uma-trio models` lists those that are, or {get}."
    )


def _existing(path: Path) -> Path:
    """Return `path` if it is a file. Raises :class:`NoSuchModel` with what is in that folder."""
    if path.is_dir():
        names = sorted(model.path.relative_to(path) for model in _in_folder(path))
        if not names:
            raise NoSuchModel(
                f"{path} is a directory without a model; name a GGUF file, or another folder by --model-dir."
            )
        shown = ", ".join(map(str, names[:_MOST_SHOWN]))
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        raise NoSuchModel(
            f"{path} is a directory with {shown}{more}: name one of them, as in {path / names[0]}, or add "
            f"--model-dir {path} and name it {stem_of(names[0].name)}."
        )
    if not path.exists() and path.parent.is_dir():
        beside = [model.path.name for model in _in_folder(path.parent, nested=False)]
        if hint := nearest(path.name, beside):
            raise NoSuchModel(f"There is no model file at {path}{hint}; check the path.")
    return path


def matching_models(name: str, found: Sequence[Found]) -> list[Found]:
    """Return the models that a name may mean, the best first: the whole name, or all but owner or tag."""
    wanted = name.lower()
    rules: tuple[Callable[[str], bool], ...] = (
        lambda each: each == wanted,
        lambda each: each.partition(":")[0] == wanted,
        lambda each: each.rpartition("/")[2] == wanted,
        lambda each: each.rpartition("/")[2].partition(":")[0] == wanted,
    )
    for rule in rules:
        fitting = [model for model in found if rule(model.name.lower())]
        if fitting:
            return sorted(fitting, key=_preference)
    return []


def _at_address(typed: str, found: Sequence[Found]) -> list[Found]:
    """Return the models of the hub that an address leads to, the best first."""
    try:
        asked = reference(typed) if is_address(typed) else None
    except PullFailed:
        asked = None
    if asked is None:
        return []
    found = [model for model in found if model.source == "hf"]
    if asked.path:
        found = [model for model in found if str(model.path).endswith(f"/{asked.path}")]
    return matching_models(str(asked), found)


def _preference(model: Found) -> tuple[int, str]:
    tag = model.name.rpartition(":")[2]
    order = (*PREFERRED, "latest")
    return (order.index(tag) if tag in order else len(order), model.name)


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


def _in_folder(folder: Path, *, nested: bool = True) -> Iterator[Found]:
    """Yield the models of a folder and of its subfolders, named after their files."""
    for path in _gguf_files(folder, ("*.gguf", "*/*.gguf") if nested else ("*.gguf",)):
        yield Found(stem_of(path.name), str(folder), path)


def _in_lm_studio(folder: Path) -> Iterator[Found]:
    for path in _gguf_files(folder, ("*/*/*.gguf",)):
        owner, repository = path.parts[-3:-1]
        yield Found(_with_quant(f"{owner}/{repository}", path.name), "lmstudio", path)


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
    """Whether a path is an existing model, or the first part of one."""
    try:
        return is_model(path.name) and part_of(path.name)[0] == 1 and path.is_file()
    except OSError:
        return False


# Hugging Face's cache: models--OWNER--REPO/{blobs/SHA256, snapshots/COMMIT/NAME, refs/main}.


def cache_folder(env: Mapping[str, str], home: Path) -> Path:
    """Return the hub's cache folder, in the order in which llama.cpp and `huggingface_hub` look for it."""
    for name in ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := env.get(name):
            return _expanded(folder, home)
    if folder := env.get("HF_HOME"):
        return _expanded(folder, home) / "hub"
    return _expanded(env.get("XDG_CACHE_HOME") or "~/.cache", home) / "huggingface" / "hub"


def _expanded(text: str, home: Path) -> Path:
    path = Path(text)
    return home.joinpath(*path.parts[1:]) if path.parts[:1] == ("~",) else path


def _in_hub_cache(cache: Path) -> Iterator[Found]:
    """Yield the models of all commits, those of the current commit first.

    A quantisation that was downloaded at an earlier commit is in the folder of that commit alone.
    """
    for folder in _subfolders(cache):
        found = _HUB_FOLDER.fullmatch(folder.name)
        if found is None:
            continue
        try:
            commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            commit = ""
        for snapshot in sorted(
            _subfolders(folder / "snapshots"), key=lambda each: each.name != commit
        ):
            for path in sorted(snapshot.rglob("*.gguf")):
                if _is_first(path):
                    name = f"{found['owner']}/{found['name']}"
                    yield Found(_with_quant(name, path.name), "hf", path)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


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
    """Return the path of a manifest's model, which need not exist; None if the manifest names none."""
    try:
        with manifest.open("rb") as file:
            document: Any = json.loads(file.read(_MOST_MANIFEST))
        layers = [each for each in document["layers"] if each.get("mediaType") == _OLLAMA_MODEL]
        digest = _DIGEST.fullmatch(str(layers[0]["digest"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return None if digest is None else store / "blobs" / f"sha256-{digest[1]}"
