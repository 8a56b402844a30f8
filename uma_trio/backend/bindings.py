"""Which build of llama.cpp is used, of those that are installed. Loads none of them.

Two distributions bring llama.cpp with the same ctypes binding: ``uma-trio-llama``, which is compiled ahead
for every CPU of a platform, and ``llama-cpp-python``, which is compiled where it is installed and may use
a GPU. A third way is a folder of libraries, such as a release of llama.cpp.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from uma_trio.backend.base import ModelError

AUTO: Final = "auto"
PACKAGED: Final = "uma_trio_llama"
SOURCE: Final = "llama_cpp"
ENV: Final = "UMA_LLAMA"
#: What our prototypes and structures are written for: the binding's version and llama.cpp's commit.
VERSION: Final = "0.3.36"
COMMIT: Final = "0c1e57098"

_DISTRIBUTIONS: Final = {PACKAGED: "uma-trio-llama", SOURCE: "llama-cpp-python"}
# A shared library of ggml for something that is no CPU: libggml-cuda.so, libggml-metal.dylib.
_GPU: Final = re.compile(
    r"libggml-(cuda|hip|vulkan|metal|sycl|musa|opencl|cann|openvino)\b.*\.(so|dylib)"
)
_INSTALL: Final = (
    "pip install 'uma-trio[cpu]', or 'uma-trio[source]' to compile llama.cpp on this machine"
)


class LlamaRefused(ModelError):
    """No build of llama.cpp can be used; the message says why, and what to do."""


@frozen
class Build:
    """One build of llama.cpp: the module of its binding, the folder of its libraries."""

    module: str
    version: str  # of the distribution; "" if it does not say
    libraries: Path
    gpu: str = ""  # what it computes on besides the CPU, such as cuda
    foreign: bool = False  # the libraries are not those that came with the binding

    @property
    def about(self) -> str:
        brought = f" with the libraries in {self.libraries}" if self.foreign else ""
        return f"{_DISTRIBUTIONS[self.module]} {self.version}".rstrip() + brought


def installed() -> tuple[Build, ...]:
    """Return the builds that are installed. Reads names of files only."""
    found = []
    for module, distribution in _DISTRIBUTIONS.items():
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
        found.append(Build(module, _version(distribution), folder, gpu_of(folder)))
    return tuple(found)


def gpu_of(folder: Path) -> str:
    """Return what the libraries in `folder` compute on besides the CPU; "" for nothing."""
    matches = (_GPU.match(file.name) for file in sorted(folder.glob("libggml-*")))
    return next((match[1] for match in matches if match), "")


def chosen(wanted: str, builds: Sequence[Build]) -> Build:
    """Return the build to use: the one that is `wanted`, or the best of those of the right version.

    `wanted` is ``auto``, the name of a binding's module, or a folder of libraries. Automatically a build
    for a GPU comes first, then the packaged one, then one that was compiled here.

    Raises:
        LlamaRefused: none is installed, or what is wanted is not.
    """
    if not builds:
        raise LlamaRefused(f"llama.cpp is not installed: {_INSTALL}.")
    if wanted not in (AUTO, *_DISTRIBUTIONS):
        return _of_folder(Path(wanted).expanduser(), builds)
    if wanted != AUTO:
        build = next((build for build in builds if build.module == wanted), None)
        if build is None:
            there = ", ".join(build.module for build in builds)
            raise LlamaRefused(f"--llama {wanted}: only {there} is installed; {_INSTALL}.")
        _refuse_version(build)
        return build
    usable = [build for build in builds if build.version in ("", VERSION)]
    if not usable:
        _refuse_version(builds[0])
    return min(usable, key=lambda build: (not build.gpu, build.module != PACKAGED))


def _of_folder(folder: Path, builds: Sequence[Build]) -> Build:
    if not any(folder.glob("libllama.*")):
        raise LlamaRefused(
            f"--llama {folder}: it is neither {' nor '.join(_DISTRIBUTIONS)}, nor a folder with libllama."
        )
    binding = chosen(AUTO, [evolve(build, gpu="") for build in builds])
    return evolve(binding, libraries=folder.absolute(), gpu=gpu_of(folder), foreign=True)


def _refuse_version(build: Build) -> None:
    if build.version not in ("", VERSION):
        raise LlamaRefused(
            f"{build.about} is another version than {VERSION}, which this uma-trio is made for: {_INSTALL}."
        )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution).partition("+")[0].partition(".post")[0]
    except metadata.PackageNotFoundError:
        return ""


def want(name: str) -> None:
    """Say which build this process is to use; too late once the backend is imported."""
    os.environ[ENV] = name
    current.cache_clear()


@cache
def current() -> Build:
    """Return the build that this process uses. Raises :class:`LlamaRefused`."""
    return chosen(os.environ.get(ENV) or AUTO, installed())
