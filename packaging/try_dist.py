"""Install what is in dist/ where there is no compiler, in every way that README names, and get a first token.

    python packaging/try_dist.py

A local index is made from dist/ and the wheels that uma-trio depends on. pip, `uv tool` and pipx install
`uma-trio[cpu]` from it, and install.sh from the folder and from a URL, each into an empty place and with a PATH that
has no compiler; then uv upgrades and removes it. Prints how long that took and how much it installed; fails if a step
fails, if too much is installed, or if the first token comes too late.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from make_dist import DIST, TOOLS
from make_release import write_checksums
from share import ROOT

HOUSE = ROOT / "build" / "wheelhouse"
WANTED = "uma-trio[cpu]"
# From nothing to the first token. On two quiet cores it takes 5 s, three of which measure the machine.
# Of the size 27 MB are huggingface_hub and what it needs.
MOST_MB, IN_ALL_S = 145.0, 30.0


def main() -> int:
    """Install, ask, print figures; return the exit status."""
    fetch_others()
    problems = []
    with tempfile.TemporaryDirectory(prefix="uma-dist-") as folder:
        home = Path(folder)
        bare = home / "bin"  # a PATH without cc, c++, make, cmake
        bare.mkdir()
        for name in (
            "sh",
            "sed",
            "dirname",
            "mktemp",
            "rm",
            "mv",
            "mkdir",
            "cp",
            "ln",
            "readlink",
            "uname",
        ):
            (bare / name).symlink_to(str(shutil.which(name)))
        with served(make_index(home / "site")) as address:
            env = {
                "PATH": str(bare),
                "HOME": folder,
                "LANG": "C.UTF-8",
                "XDG_RUNTIME_DIR": folder,
                "PIP_INDEX_URL": f"{address}/simple",
                "UV_DEFAULT_INDEX": f"{address}/simple",
                "PYTHON": sys.executable,
                "PIP_CONFIG_FILE": os.devnull,
            }
            for how, install in (
                ("pip", by_pip),
                ("uv tool", by_uv),
                ("pipx", by_pipx),
                ("install.sh, folder", partial(by_script, source=str(home / "site" / "release"))),
                ("install.sh, URL", partial(by_script, source=f"{address}/release")),
            ):
                problems += tried(how, home / how.replace(" ", "-"), env, install)
            for word in ("upgrade", "uninstall"):
                uv(home / "uv-tool", env, word, "uma-trio")
        if any((home / "uv-tool").rglob("*uma-trio*")):
            problems.append("uv tool uninstall leaves files")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def make_index(site: Path) -> Path:
    """Make a package index below `site`/simple (PEP 503), and a release in `site`/release; return `site`."""
    release = site / "release"
    release.mkdir(parents=True)
    for file in DIST.iterdir():
        if file.is_file() and file.name != "SHA256SUMS":
            os.link(file, release / file.name)
    if not (release / "install.sh").exists():
        shutil.copy(ROOT / "packaging" / "install.sh", release)
    write_checksums(release)
    for wheel in (*DIST.glob("*.whl"), *HOUSE.glob("*.whl")):
        project = (
            site
            / "simple"
            / wheel.name.partition("-")[0].replace("_", "-").replace(".", "-").lower()
        )
        project.mkdir(parents=True, exist_ok=True)
        os.link(wheel, project / wheel.name)
    return site


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve `folder` over HTTP on loopback; yield the address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


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
    # pipx has a pip of its own for all that it installs, and compiles what others compile at the first start.
    besides = {"shared", "__pycache__"}
    files = (file for file in place.rglob("*") if besides.isdisjoint(file.relative_to(place).parts))
    size = sum(file.lstat().st_size for file in files if file.is_file()) / 1e6
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
    subprocess.run([sys.executable, "-m", "pip", "download", *options, WANTED, "pip"], check=True)
    for ours in HOUSE.glob("uma_*"):
        ours.unlink()


def by_pip(place: Path, env: dict[str, str]) -> Path:
    """Make an environment without pip and install the artefacts into it; return the program."""
    venv.create(place, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    # Without bytecode, as uv installs.
    options = ["--quiet", "--no-compile", "--only-binary", ":all:", "--no-cache-dir"]
    subprocess.run([*command, "install", *options, WANTED], env=env, check=True)
    return place / "bin" / "uma-trio"


def by_uv(place: Path, env: dict[str, str]) -> Path:
    """Install the artefacts as a tool of uv's; return the program."""
    uv(place, env, "install", "--python", sys.executable, WANTED)
    return place / "bin" / "uma-trio"


def by_pipx(place: Path, env: dict[str, str]) -> Path:
    """Install the artefacts with pipx; return the program."""
    folders = {"PIPX_HOME": str(place / "home"), "PIPX_BIN_DIR": str(place / "bin")}
    command = [
        str(TOOLS / "bin" / "python"),
        "-m",
        "pipx",
        "install",
        "--quiet",
        "--python",
        sys.executable,
    ]
    own = {**env, **folders, "PIP_NO_CACHE_DIR": "1", "PIPX_MAN_DIR": str(place / "man")}
    subprocess.run([*command, "--backend", "pip", WANTED], env=own, check=True)
    return place / "bin" / "uma-trio"


def by_script(place: Path, env: dict[str, str], source: str) -> Path:
    """Install the release at `source` with its install.sh; return the program."""
    script = ROOT / "packaging" / "install.sh"
    own = {**env, "PIP_NO_CACHE_DIR": "1"}
    command = [shutil.which("sh") or "sh", str(script), "--from", source, "--prefix", str(place)]
    subprocess.run(command, env=own, check=True)
    return place / "bin" / "uma-trio"


def uv(place: Path, env: dict[str, str], *words: str) -> None:
    """Run `uv tool` with its folders in `place`."""
    folders = {"UV_TOOL_DIR": str(place / "tools"), "UV_TOOL_BIN_DIR": str(place / "bin")}
    own = {**env, **folders, "UV_CACHE_DIR": f"{place}-cache"}
    command = [str(TOOLS / "bin" / "uv"), "tool", words[0], "--quiet", *words[1:]]
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
