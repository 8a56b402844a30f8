"""Install this checkout for one user, with the llama.cpp that `make setup` compiled for this machine.

    .venv/bin/python packaging/install.py [--prefix ~/.local]

Builds the wheels of the checkout; packaging/install.sh does the rest, as it does for a release. Running it again updates.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from share import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import setup as checkout

WHEELS = ROOT / "build" / "install"


def main() -> int:
    """Build and install; return the exit status."""
    llama = checkout.cached_wheel(checkout.wheel_key())
    if llama is None:
        print("llama.cpp is not compiled yet; run `make setup` first.", file=sys.stderr)
        return 1
    shutil.rmtree(WHEELS, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(WHEELS)]
    subprocess.run([*pip, str(ROOT / "protocol"), str(ROOT)], check=True)
    shutil.copy(llama, WHEELS)
    command = ["sh", str(ROOT / "packaging" / "install.sh"), "--from", str(WHEELS), *sys.argv[1:]]
    return subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
