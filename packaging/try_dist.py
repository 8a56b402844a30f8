"""Install what is in dist/ where there is no compiler, and get a first token.

    python packaging/try_dist.py

An empty environment gets uma-trio[cpu] from dist/ and a folder of other wheels, without an index and with a PATH
that has no compiler. Prints how long that took and how much it installed; fails if a step fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST, HOUSE = ROOT / "dist", ROOT / "build" / "wheelhouse"
LIMIT_BYTES = 135_000_000
WANTED = "uma-trio[cpu]"


def main() -> int:
    """Install, ask, print figures; return the exit status."""
    fetch_others()
    with tempfile.TemporaryDirectory(prefix="uma-dist-") as folder:
        home = Path(folder)
        bare = home / "bin"  # a PATH without cc, c++, make, cmake
        bare.mkdir()
        env = {"PATH": str(bare), "HOME": folder, "LANG": "C.UTF-8", "XDG_RUNTIME_DIR": folder}
        began = time.monotonic()
        install(home / "venv", env)
        installed = time.monotonic()
        first_token(home / "venv" / "bin" / "uma-trio", home / "s", env)
        answered = time.monotonic()
        size = sum(file.lstat().st_size for file in (home / "venv").rglob("*") if file.is_file())
    print(f"installed in {installed - began:.1f} s, {size / 1e6:.0f} MB")
    print(f"first token {answered - installed:.1f} s later, {answered - began:.1f} s in all")
    if size > LIMIT_BYTES:
        print(f"too large: the limit is {LIMIT_BYTES / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


def fetch_others() -> None:
    """Have the wheels of what uma-trio depends on here, as an index would."""
    options = ["--quiet", "--only-binary", ":all:", "--find-links", str(DIST), "--dest", str(HOUSE)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, WANTED], check=True)
    for ours in HOUSE.glob("uma_*"):
        ours.unlink()


def install(place: Path, env: dict[str, str]) -> None:
    """Make an environment without pip and install the artefacts into it."""
    venv.create(place, symlinks=True)
    links = ["--no-index", "--find-links", str(DIST), "--find-links", str(HOUSE)]
    command = [sys.executable, "-m", "pip", "--isolated", "--python", str(place / "bin" / "python")]
    # Without bytecode, as uv installs.
    done = [
        *command,
        "install",
        "--quiet",
        "--no-compile",
        "--only-binary",
        ":all:",
        *links,
        WANTED,
    ]
    subprocess.run(done, env=env, check=True)


def first_token(program: Path, socket: Path, env: dict[str, str]) -> None:
    """Start the daemon and get one token of the bundled model."""
    daemon = subprocess.Popen([program, "serve", "--socket", str(socket)], env=env)
    try:
        for _ in range(300):
            if socket.exists() or daemon.poll() is not None:
                break
            time.sleep(0.1)
        command = [program, "run", "--socket", str(socket), "--max-tokens", "1", "Hello"]
        said = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        if not said.stdout.strip():
            raise SystemExit("the daemon answered nothing")
        subprocess.run([program, "doctor", "--socket", str(socket)], env=env, check=True)
    finally:
        daemon.terminate()
        daemon.wait()


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
