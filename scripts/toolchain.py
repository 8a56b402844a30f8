"""What this machine compiles with and for; standard library only, used by setup.py."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

_PROBE = (
    "#include <optional>\n#include <filesystem>\nint main() { return *std::optional<int>(0); }\n"
)
_AMX_OFF = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


def compiler() -> str:
    """Return the C++ compiler's command."""
    return os.environ.get("CXX") or "c++"


def has_cpp17() -> bool:
    """Whether the compiler takes a C++17 program."""
    command = [*shlex.split(compiler()), "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    try:
        result = subprocess.run(command, input=_PROBE, text=True, capture_output=True, check=False)
    except OSError:
        return False
    return result.returncode == 0


@functools.cache
def compiler_version() -> str:
    """Return the compiler's own first line, or nothing."""
    return _output([*shlex.split(compiler()), "--version"]).partition("\n")[0]


def amx_flags() -> str:
    """Return flags that leave AMX out, where this processor has it and this compiler gets it wrong."""
    return _AMX_OFF if "amx_tile" in cpu_flags() and miscompiles_amx() else ""


def miscompiles_amx() -> bool:
    """Whether this compiler gets AMX wrong.

    GCC PR target/114098: the tile configuration's stores are optimised away, and the first
    batch of two tokens with a quantised model is a segmentation fault. Fixed in GCC 12.4,
    13.3 and 14.
    """
    if "clang" in compiler_version().lower():
        return False
    text = _output([*shlex.split(compiler()), "-dumpfullversion"]).strip()
    numbers = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?", text)
    if not numbers:
        return False
    version = int(numbers[1]), int(numbers[2])
    return version < (12, 4) or (13, 0) <= version < (13, 3)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's features as the kernel names them; empty where it does not say."""
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_identity() -> str:
    """Return a name for the kind of CPU: a native build runs on this kind and no other."""
    model = next(
        (line.partition(":")[2] for line in _cpuinfo() if line.startswith("model name")), ""
    )
    if platform.system() == "Darwin":
        model = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    digest = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    return f"{platform.system()} {platform.machine()} {model.strip()} {digest}"


def jobs() -> int:
    """Return how many compilers may run at once: one a core, and a gigabyte for each."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return cores
    return max(1, min(cores, memory // (1 << 30)))


@functools.cache
def _cpuinfo() -> tuple[str, ...]:
    try:
        return tuple(Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    except OSError:
        return ()


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, text=True, capture_output=True, check=False).stdout
    except OSError:
        return ""
