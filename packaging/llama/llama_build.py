"""Compile llama.cpp and adapt its binding: what `uma_trio_llama` has besides its `__init__.py`.

The source is llama-cpp-python's source archive, which brings the llama.cpp that its binding is for. On Linux
every CPU backend is a library of its own, and ggml loads the best one that the processor can run. Elsewhere
there is one build, with llama.cpp's defaults for that platform. What is compiled is kept by all that changes
it, so that a second build compiles what is missing, or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolchain import compiler_version, jobs, miscompiles_amx

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098"
LINUX = sys.platform.startswith("linux")
AMX_VARIANT = "sapphirerapids"

# Read by CMake right after project(). ggml's library asks for every variant to be compiled before it; we name
# those that we want. CMake keeps a command that is replaced under its name with an underscore.
_HOOK = """\
function(add_dependencies target)
    if(NOT target STREQUAL "ggml")
        _add_dependencies(${target} ${ARGN})
    endif()
endfunction()
"""
_OFF = ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")
# What the binding asks of others and a package of its own does not need, or has under another name.
_ADAPTED = {
    "_ctypes_extensions.py": (("from typing_extensions import", "from typing import"),),
    "llama_cpp.py": (("from llama_cpp._ctypes", "from uma_trio_llama._ctypes"),),
}
_LIBGOMP = """\
libgomp.so.1 is GCC's run-time library for OpenMP, unchanged, as the compiler's distribution ships it.
Copyright (C) Free Software Foundation, Inc. It is free software under the GNU General Public License, version 3
or later, with the GCC Runtime Library Exception, version 3.1. Texts: https://www.gnu.org/licenses/gpl-3.0.html and
https://www.gnu.org/licenses/gcc-exception-3.1.html. Source: https://gcc.gnu.org.
"""


def build(home: Path, wanted: Sequence[str]) -> Path:
    """Compile in the folder `home` and return the folder of what belongs into the package.

    `wanted` names variants of the CPU backend; all that this compiler gets right if it is empty. If the same
    was made here before, by :func:`key`, it is returned as it is. An interrupted build is taken up.
    """
    tree = home / key()
    made = tree / "-".join(["package", *sorted(wanted)])
    if made.exists():
        return made
    tree.mkdir(parents=True, exist_ok=True)
    source = _unpacked(home)
    cmake = tree / "build"
    _run("cmake", *_configuration(source, cmake, tree))
    variants = _variants(cmake, wanted) if LINUX else []
    targets = ["llama", *(f"ggml-cpu-{name}" for name in variants)]
    _run("cmake", "--build", str(cmake), "--parallel", str(jobs()), "--target", *targets)
    unfinished = tree / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    _take_libraries(cmake / "bin", unfinished / "lib", variants)
    _take_binding(source, unfinished)
    unfinished.rename(made)
    return made


def key() -> str:
    """Return a digest of what changes a compiled library: the source, its flags, the compiler, the platform."""
    flags = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")
    parts = [SHA256, Path(__file__).read_text(encoding="utf-8"), compiler_version()]
    parts += [sysconfig.get_platform(), *platform.libc_ver()]
    parts += [os.environ.get(name, "") for name in flags]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _unpacked(home: Path) -> Path:
    """Return the folder of the source, fetched unless it is there."""
    folder = home / f"llama_cpp_python-{VERSION}"
    if not (folder / "complete").exists():
        archive = _archive(home)
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
            raise SystemExit(f"{archive} is not llama-cpp-python {VERSION} as it was published.")
        with tarfile.open(archive) as packed:
            packed.extractall(home, filter=_needed)
        (folder / "complete").touch()
    return folder


def _needed(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Leave out what is not compiled: two thirds of the files' size."""
    if re.match(r"[^/]+/vendor/llama\.cpp/(docs|models|tests|benches)/", member.name):
        return None
    return tarfile.data_filter(member, folder)


def _archive(home: Path) -> Path:
    given = os.environ.get("UMA_TRIO_LLAMA_SOURCE")
    if given:
        return Path(given)
    found = home / f"llama_cpp_python-{VERSION}.tar.gz"
    if not found.exists():
        options = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(home)]
        _run(sys.executable, "-m", "pip", "download", *options, f"llama-cpp-python=={VERSION}")
    return found


def _configuration(source: Path, cmake: Path, tree: Path) -> list[str]:
    """Return CMake's arguments."""
    hook = tree / "hook.cmake"
    hook.write_text(_HOOK, encoding="utf-8")
    arguments = [
        *("-S", str(source / "vendor" / "llama.cpp"), "-B", str(cmake), "-G", "Ninja"),
        # An isolated build has another ninja each time, and CMake would look for the one it remembers.
        f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
        *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=OFF"),
        *(f"-DLLAMA_BUILD_{name}=OFF" for name in _OFF),
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        # An archive has no history to ask git for; the library still has to say its commit.
        f"-DGIT_EXE=sh;-c;echo {COMMIT}",
    ]
    if LINUX:
        arguments += ["-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON"]
        arguments += ["-DCMAKE_INSTALL_RPATH=$ORIGIN", f"-DCMAKE_PROJECT_ggml_INCLUDE={hook}"]
        arguments += [f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={hook}"]
    elif sys.platform == "darwin":
        arguments += ["-DCMAKE_INSTALL_RPATH=@loader_path", "-DGGML_METAL_EMBED_LIBRARY=ON"]
    return arguments


def _variants(cmake: Path, wanted: Sequence[str]) -> list[str]:
    """Return the variants to compile, of those that this CMake configuration knows."""
    listed = _output("cmake", "--build", str(cmake), "--target", "help")
    known = sorted(set(re.findall(r"\bggml-cpu-(\w+(?:\.\w+)?): phony", listed)))
    known = [name for name in known if not name.endswith("feats")]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"No variants {' '.join(unknown)}; there are {' '.join(known)}.")
    chosen = list(wanted) or known
    if AMX_VARIANT in chosen and miscompiles_amx():
        print(f"{AMX_VARIANT} is left out: this compiler miscompiles AMX (GCC PR 114098).")
        chosen.remove(AMX_VARIANT)
    return chosen


def _take_libraries(built: Path, lib: Path, variants: Iterable[str]) -> None:
    """Copy each library once, under the name by which it is loaded, without its symbols."""
    lib.mkdir(parents=True)
    if LINUX:
        names = ["libllama.so", "libggml.so.0", "libggml-base.so.0"]
        names += [f"libggml-cpu-{name}.so" for name in variants]
        gomp = _output(os.environ.get("CC", "cc"), "-print-file-name=libgomp.so.1").strip()
        shutil.copyfile(Path(gomp).resolve(), lib / "libgomp.so.1")
    else:
        names = [
            file.name for file in built.glob("*.dylib") if not re.search(r"\.\d+\.", file.name)
        ]
        names += [file.name for file in built.glob("lib*.0.dylib")]
    for name in names:
        shutil.copyfile((built / name).resolve(), lib / name)
        (lib / name).chmod(0o755)
        _run("strip", "--strip-unneeded" if LINUX else "-x", str(lib / name))


def _take_binding(source: Path, made: Path) -> None:
    """Copy the binding, adapted to its package, and the licences of all."""
    for name, changes in _ADAPTED.items():
        text = (source / "llama_cpp" / name).read_text(encoding="utf-8")
        for old, new in changes:
            if old not in text:
                raise SystemExit(f"{name} has no longer {old!r}; adapt {__file__}.")
            text = text.replace(old, new)
        (made / name).write_text(text, encoding="utf-8")
    licences = made / "licenses"
    licences.mkdir()
    shutil.copyfile(source / "LICENSE.md", licences / "llama-cpp-python.txt")
    shutil.copyfile(source / "vendor" / "llama.cpp" / "LICENSE", licences / "llama.cpp.txt")
    if LINUX:
        (licences / "libgomp.txt").write_text(_LIBGOMP, encoding="utf-8")


def platform_tag(lib: Path) -> str:
    """Return the platform's tag of a wheel with these libraries: the oldest glibc that has what they use.

    No older one than of manylinux_2_34, whose libstdc++ GCC 12 needs; auditwheel checks it.
    """
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if not LINUX:
        return platform
    used = {
        int(minor)
        for file in lib.iterdir()
        for minor in re.findall(rb"GLIBC_2\.(\d+)\0", file.read_bytes())
    }
    return f"manylinux_2_{max(34, *used)}_{platform.removeprefix('linux_')}"


def _run(*command: str) -> None:
    # With SOURCE_DATE_EPOCH set, which hatchling honours, ggml turns off instruction sets.
    env = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    subprocess.run(command, check=True, env=env)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
