"""What the operating system knows about this machine and its processes. Linux: it reads /proc.

CPU time by thread comes from ``schedstat``, which counts nanoseconds on a CPU; the ticks of
``stat`` (10 ms) are far too coarse for microseconds per token.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).resolve().parent.parent


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the CPU seconds of each thread of `pid` that is alive now, by thread id."""
    seconds: dict[int, float] = {}
    for task in (PROC / str(pid) / "task").iterdir():
        try:
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue  # it ended while we looked
    return seconds


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of `pid` together, ended ones included."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def busy_cpu_s() -> float:
    """Return the CPU seconds that this machine has worked, or been robbed of, since it started."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * TICK_S


@dataclass(frozen=True)
class Memory:
    """Proportional set size in MiB: private pages whole, shared ones by their share."""

    pss: float
    anonymous: float
    file: float


def memory(pid: int) -> Memory:
    """Return what `pid` takes of the machine's memory.

    Pages of a mapped model are shared between all processes that map the same file, so nothing
    else may have it mapped meanwhile.
    """
    found: dict[str, float] = {}
    for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]:
        name, amount = line.split()[:2]
        found[name.rstrip(":")] = int(amount) / 1024
    return Memory(found["Pss"], found.get("Pss_Anon", 0.0), found.get("Pss_File", 0.0))


class Foreign:
    """Measures what share of the machine others took while servers and we were at work."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._before = busy_cpu_s() - self._own()

    def _own(self) -> float:
        own = os.times()
        servers = sum(map(process_cpu_s, self._pids))
        return own.user + own.system + own.children_user + own.children_system + servers

    def percent(self) -> float:
        """Return the share of all cores since the beginning that was neither ours nor idle."""
        seconds = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        others = busy_cpu_s() - self._own() - self._before
        return 100 * max(0.0, others) / seconds if seconds > 0 else 0.0


def spin_ms() -> float:
    """Return how long a fixed piece of work takes: where it varies, so does the machine.

    It sees what no other figure does: a clock that was turned down, a quota of a container.
    """
    began = time.perf_counter()
    n = 0
    for i in range(400_000):
        n += i
    return (time.perf_counter() - began) * 1e3


def noise() -> str:
    """Return how steady the machine is before anything runs: a fixed piece of work, 20 times."""
    spins = sorted(spin_ms() for _ in range(20))
    return f"a fixed piece of work takes {spins[10]:.1f} ms, {spins[-1] / spins[10]:.2f}x at worst"


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).strip().partition("\n")[0]


def _commit() -> str:
    commit = _first_line(["git", "rev-parse", "--short=12", "HEAD"])
    changed = _first_line(["git", "status", "--porcelain", "--", "uma_trio", "protocol"])
    return f"{commit} with local changes" if commit and changed else commit


def _cpu_model() -> str:
    for line in (PROC / "cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _governor() -> str:
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return path.read_text().strip() if path.exists() else "unknown"


def facts(llama_server: Path | None = None) -> dict[str, str]:
    """Return what a reader has to know to judge a figure: machine, commits, versions."""
    total_kib = int((PROC / "meminfo").read_text().split()[1])
    found = {
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores, {total_kib / (1 << 20):.0f} GiB",
        "kernel": platform.release(),
        "governor": _governor(),
        "load_1m": f"{os.getloadavg()[0]:.2f}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "uma-trio": _commit(),
        "python": platform.python_version(),
    }
    for name in ("llama-cpp-python", "trio", "msgspec", "numpy"):
        found[name] = metadata.version(name)
    if llama_server is not None:
        found["peer llama.cpp"] = _first_line([str(llama_server), "--version"])
    return found
