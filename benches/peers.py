"""llama.cpp's own programs, from the very sources our binding was compiled from.

    python -m benches.peers --build        about 5 minutes on 2 cores, kept outside the checkout
    python -m benches.peers                says which programs the benchmarks would use

The source distribution of llama-cpp-python brings llama.cpp with its server and its benchmarks.
Built with the flags that the binding is built with here, they make a ratio compare servers, and
not versions or compilers of llama.cpp.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from scripts import toolchain

PROGRAMS = ("llama-server", "llama-batched-bench", "llama-bench", "llama-quantize")
VOCABULARY = "ggml-vocab-qwen2.gguf"
_DISTRIBUTION = "llama-cpp-python"
_CONFIGURE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    # Without it the build of the server looks for a web page on the network.
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)


class NoPeers(Exception):
    """The programs are not here; the message says how to get them."""


def version() -> str:
    """Return the version of the binding that is installed, and so of the sources to build."""
    return metadata.version(_DISTRIBUTION)


def home() -> Path:
    """Return where this machine's build belongs: one for each version, compiler and CPU."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    parts = (
        version(),
        *_CONFIGURE,
        toolchain.compiler_version(),
        toolchain.amx_flags(),
        toolchain.cpu_identity(),
    )
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache / "uma-trio" / "peers" / key


def programs(given: Path | None = None) -> Path:
    """Return the folder that has the programs: `given`, ``UMA_PEERS``, or what was built.

    Raises:
        NoPeers: it does not have them.
    """
    named = given or (Path(text) if (text := os.environ.get("UMA_PEERS")) else None)
    folder = named or home() / "build" / "bin"
    missing = [name for name in PROGRAMS[:2] if not (folder / name).exists()]
    if missing:
        raise NoPeers(
            f"{folder} has no {' and no '.join(missing)}; build llama.cpp's programs with "
            "`python -m benches.peers --build` (about 5 minutes), or name a folder by --peers"
        )
    return folder


def vocabulary(given: Path | None = None) -> Path | None:
    """Return a GGUF with a real tokenizer: `given`, ``UMA_BENCH_VOCAB``, or the sources' own."""
    if given is not None:
        return given
    if text := os.environ.get("UMA_BENCH_VOCAB"):
        return Path(text)
    found = home() / "source" / "models" / VOCABULARY
    return found if found.exists() else None


def sources() -> Path:
    """Return llama.cpp's sources, downloading and unpacking them if they are not here."""
    target = home() / "source"
    if target.exists():
        return target
    home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home()) as folder:
        _run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", _DISTRIBUTION,
              "--dest", folder, f"{_DISTRIBUTION}=={version()}"])  # fmt: skip
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (unpacked,) = Path(folder).glob("*/vendor/llama.cpp")
        # Last, so that an interrupted run leaves nothing that looks whole.
        shutil.move(unpacked, target)
    return target


def configure_command(source: Path, build: Path) -> list[str]:
    """Return the call of CMake that prepares the build."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    return ["cmake", "-S", str(source), "-B", str(build), *generator, *_CONFIGURE]


def build_command(build: Path) -> list[str]:
    """Return the call of CMake that compiles the programs."""
    parallel = ["--parallel", str(toolchain.jobs())]
    return ["cmake", "--build", str(build), *parallel, "--target", *PROGRAMS]


def build() -> Path:
    """Compile the programs and return their folder; quick if they are there."""
    folder = home() / "build"
    source = sources()
    env = dict(os.environ)
    # With it set, ggml turns off every instruction set of this CPU.
    env.pop("SOURCE_DATE_EPOCH", None)
    for name in ("CFLAGS", "CXXFLAGS"):
        env[name] = f"{env.get(name, '')} {toolchain.amx_flags()}".strip()
    _run(configure_command(source, folder), env)
    _run(build_command(folder), env)
    return folder / "bin"


def _run(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    sys.stderr.write(f"$ {' '.join(command)}\n")
    sys.stderr.flush()
    subprocess.run(command, check=True, env=env)


def main() -> int:
    """Build the programs, or say where they are."""
    parser = argparse.ArgumentParser(prog="python -m benches.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--build", action="store_true", help="compile them into the cache")
    parser.add_argument("--peers", type=Path, help="a folder that has them (UMA_PEERS)")
    given = parser.parse_args()
    try:
        print(build() if given.build else programs(given.peers))
    except NoPeers as absence:
        sys.stderr.write(f"{absence}\n")
        return 1
    except (subprocess.CalledProcessError, FileNotFoundError) as failure:
        sys.stderr.write(f"the build failed: {failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
