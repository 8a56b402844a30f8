"""Install what is in dist/ where there is no compiler, and get a first token; then update and remove it.

    python packaging/try_dist.py

pip installs uma-trio[cpu] from dist/ and a folder of other wheels into an empty environment, without an index and with
a PATH that has no compiler. `uv tool` then installs, upgrades and removes the same. Prints how long that took and how
much it installed; fails if a step fails, if too much is installed, or if the first token comes too late.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

from make_dist import DIST, TOOLS
from share import ROOT

HOUSE = ROOT / "build" / "wheelhouse"
LINKS = ("--no-index", "--find-links", str(DIST), "--find-links", str(HOUSE))
WANTED = "uma-trio[cpu]"
# From nothing to the first token. On two quiet cores it takes 5 s, three of which measure the machine.
MOST_MB, IN_ALL_S = 135.0, 30.0


def main() -> int:
    """Install, ask, print figures; return the exit status."""
    fetch_others()
    problems = []
    with tempfile.TemporaryDirectory(prefix="uma-dist-") as folder:
        home = Path(folder)
        bare = home / "bin"  # a PATH without cc, c++, make, cmake
        bare.mkdir()
        env = {"PATH": str(bare), "HOME": folder, "LANG": "C.UTF-8", "XDG_RUNTIME_DIR": folder}
        for how, install in (("pip", by_pip), ("uv tool", by_uv)):
            problems += tried(how, home / how.partition(" ")[0], env, install)
        for word in ("upgrade", "uninstall"):
            uv(home / "uv", env, word, "uma-trio")
        if any((home / "uv").rglob("*uma-trio*")):
            problems.append("uv tool uninstall leaves files")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def tried(
    how: str, place: Path, env: dict[str, str], install: Callable[[Path, dict[str, str]], Path]
) -> list[str]:
    """Install into `place` and get one token; print what that took, and return what was too much."""
    began = time.monotonic()
    program = install(place, env)
    installed = time.monotonic()
    try:
        ask(program, env)
        answered = time.monotonic()
        subprocess.run([program, "doctor"], env=env, check=True)
    finally:
        subprocess.run([program, "stop"], env=env, check=True)
    size = sum(file.lstat().st_size for file in place.rglob("*") if file.is_file()) / 1e6
    later, in_all = answered - installed, answered - began
    print(f"{how}: installed in {installed - began:.1f} s, {size:.0f} MB;", end=" ")
    print(f"first token {later:.1f} s later, {in_all:.1f} s in all", flush=True)
    limits = (
        (size, MOST_MB, "MB"),
        (in_all, IN_ALL_S, "s from nothing to the first token"),
    )
    return [
        f"{how}: {is_now:.1f} {what}, and the limit is {limit:g}"
        for is_now, limit, what in limits
        if is_now > limit
    ]


def fetch_others() -> None:
    """Have the wheels of what uma-trio depends on here, as an index would."""
    options = ["--quiet", "--only-binary", ":all:", "--find-links", str(DIST), "--dest", str(HOUSE)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, WANTED], check=True)
    for ours in HOUSE.glob("uma_*"):
        ours.unlink()


def by_pip(place: Path, env: dict[str, str]) -> Path:
    """Make an environment without pip and install the artefacts into it; return the program."""
    venv.create(place, symlinks=True)
    command = [sys.executable, "-m", "pip", "--isolated", "--python", str(place / "bin" / "python")]
    # Without bytecode, as uv installs.
    options = ["--quiet", "--no-compile", "--only-binary", ":all:", *LINKS]
    subprocess.run([*command, "install", *options, WANTED], env=env, check=True)
    return place / "bin" / "uma-trio"


def by_uv(place: Path, env: dict[str, str]) -> Path:
    """Install the artefacts as a tool of uv's; return the program."""
    uv(place, env, "install", *LINKS, "--python", sys.executable, WANTED)
    return place / "bin" / "uma-trio"


def uv(place: Path, env: dict[str, str], *words: str) -> None:
    """Run `uv tool` with its folders in `place`."""
    folders = {"UV_TOOL_DIR": str(place / "tools"), "UV_TOOL_BIN_DIR": str(place / "bin")}
    own = {**env, **folders, "UV_CACHE_DIR": f"{place}-cache"}
    command = [str(TOOLS / "bin" / "uv"), "tool", words[0], "--quiet", "--offline", *words[1:]]
    subprocess.run(command, env=own, check=True)


def ask(program: Path, env: dict[str, str]) -> None:
    """Get one token of the bundled model, from a daemon that is started for it."""
    command = [program, "run", "--start", "--max-tokens", "1", "Hello"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    if not said.stdout.strip():
        raise SystemExit("the daemon answered nothing")


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
