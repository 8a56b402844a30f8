"""What this machine is: its cores and its processor's features, as the kernel tells them."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

# The model, the trace, the event loop; on each front end 64 clients that are turned away, 64 that make
# room, and 512 that wait for their turn to be let in.
_OWN_FILES = 1344
# After so long a thread has to give up the interpreter to one that waits. A fake of an H200 (ticks of 3 ms, a
# reader beside prompts): tokens were shown 0.99 ms late at p95 with 0.5 ms, 0.54 with 0.1, 0.53 with 0.03. With
# a model on a CPU 0.1 ms costs a few percent more CPU, and half a millisecond is a small part of a tick.
SWITCH_S, SWITCH_OVERLAPPING_S = 0.0005, 0.0001
# Collections of the middle generation before all objects are looked at: 700,000 new ones that stay. With Python's
# 10 a flood of requests had one in 500 to 1,500 requests.
COLLECTIONS_UNTIL_ALL = 100


def physical_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy: siblings of one core count once.

    Affinity and the cgroup's CPU quota are respected. llama.cpp computes as fast with one thread
    a core as with two, and leaves the siblings to everybody else.
    """
    allowed = _allowed_cpus()
    seen = set()
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            seen.add((topology / "thread_siblings_list").read_text(encoding="ascii").strip())
        except OSError:
            seen.add(str(cpu))
    cores = len(seen)
    if sys.platform == "darwin":
        cores = _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu") or cores
    quota = cpu_quota(root)
    return max(1, min(cores, int(quota) if quota is not None and quota >= 1 else cores))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' worth of time the cgroup grants, or None if it sets no limit."""
    group = root / "sys/fs/cgroup"
    older = group / "cpu"
    return _share(group / "cpu.max") or _share(
        older / "cpu.cfs_quota_us", older / "cpu.cfs_period_us"
    )


def _share(*files: Path) -> float | None:
    """Return the quota over the period, which stand in `files`; None if one is not there."""
    try:
        quota, period = " ".join(file.read_text(encoding="ascii") for file in files).split()
        share = int(quota) / int(period)
    except (OSError, ValueError):
        return None  # "max" is no number either
    return share if share > 0 else None


def cpu_features(root: Path = Path("/")) -> frozenset[str]:
    """Return the processor's features by the kernel's names; empty where it does not say."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def identity(root: Path = Path("/")) -> str:
    """Return what tells this machine from others that compute at another speed.

    Its processor, how many of them it has, and its memory in GiB. Not its name, which changes.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{_processor(root)}, {os.cpu_count()} CPUs, {memory / 2**30:.0f} GiB"


def _processor(root: Path) -> str:
    """Return the processor by name, as far as the system tells it."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _sysctl_text("machdep.cpu.brand_string") or platform.machine()
    # ARM kernels name parts by number.
    for name in ("model name", "CPU part"):
        found = sorted({line.partition(":")[2].strip() for line in lines if line.startswith(name)})
        if found:
            return " ".join(found)
    return platform.machine()


def _allowed_cpus() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return set(range(os.cpu_count() or 1))


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process could have, by the machine and its cgroup."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    found = [pages * page]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            found.append(int((root / "sys/fs/cgroup" / name).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # "max" is no number either
    return min(found)


def _sysctl(name: str) -> int:
    text = _sysctl_text(name)
    return int(text) if text.isdecimal() else 0


def _sysctl_text(name: str) -> str:
    command = ["/usr/sbin/sysctl", "-n", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def files_needed(max_sessions: int) -> int:
    """Return how many open files a daemon may need for so many clients, and for itself.

    A client is a socket, and one that has ended its sending side another file, which tells when it
    leaves.
    """
    return 2 * max_sessions + _OWN_FILES


def limit_spinning(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let llama.cpp's threads wait for each other by spinning only briefly, then by sleeping.

    Call it before llama.cpp is loaded; a user's own setting wins. A tick has hundreds of
    barriers, and GNU OpenMP spins at each for milliseconds. Where another program wants a core,
    as it does on a developer's machine, the spinning thread takes the time that the one it waits
    for would need: a decode of 0.6 ms took 1,550 ms beside a compiler on two cores, and 8 ms with
    this. On idle cores it makes no difference (0.6 and 0.6 ms; 0.5B model: 30 and 31 ms).
    """
    if "GOMP_SPINCOUNT" not in environ and "OMP_WAIT_POLICY" not in environ:
        environ["GOMP_SPINCOUNT"] = "1000"


def give_memory_back() -> None:
    """Let the system have the memory that was freed, where the C library keeps it (glibc does).

    It takes about 0.1 s for each GB (0.02 s for 250 MB on two cores), without the interpreter's lock.
    glibc returns by itself only what is free at the end of its heap, and blocks that it mapped one by
    one. Once such a block is freed, blocks up to its size come from the heap (mallopt(3),
    M_MMAP_THRESHOLD), and so does what is saved of prompts.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def spare_imports() -> None:
    """Have the garbage collector leave alone what is there now, and look at all that comes seldom.

    So a collection in the middle of a stream looks only at what is new: 40,000 objects, as of the latest ticks, hold the
    interpreter for 10 to 25 ms. What is left alone is never freed if it is part of a cycle. So this is called when all is
    imported, and before a model is loaded.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, COLLECTIONS_UNTIL_ALL)


def share_interpreter(*, overlaps: bool) -> None:
    """Let a thread that wants the interpreter have it sooner than within the 5 ms of Python.

    A tick that has been computed must not wait for a thread that only writes frames, nor a token that is due for the
    engine's work. That is longest where it `overlaps` with a decode (a GPU), and ticks are short.
    """
    sys.setswitchinterval(SWITCH_OVERLAPPING_S if overlaps else SWITCH_S)


def cpu_seconds_of(pid: int) -> float | None:
    """Return the processor time of another process, all its threads together; None if nobody can tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # what is before may have spaces in it
        return (int(fields[11]) + int(fields[12])) / os.sysconf(
            "SC_CLK_TCK"
        )  # utime, stime: proc(5)
    except (OSError, ValueError, IndexError):
        return None
