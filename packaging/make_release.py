"""Make everything that a release consists of in dist/, with its checksums.

    python packaging/make_release.py [--variants "x64 haswell"] [--python /usr/bin/python3]

The wheels and source distributions (make_dist), the Debian package where this is Debian (make_deb), Homebrew's formula
(make_formula), the installer and SHA256SUMS. .github/workflows/release.yml publishes what this makes.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from make_dist import DIST
from share import ROOT

_HERE = ROOT / "packaging"


def main() -> int:
    """Make dist/; return the exit status."""
    parser = argparse.ArgumentParser(description="Make a release in dist/.")
    parser.add_argument(
        "--variants", default="", help="CPU backends, such as 'x64 haswell'; all by default"
    )
    parser.add_argument(
        "--python", default="/usr/bin/python3", help="the system's, for the Debian package"
    )
    given = parser.parse_args()
    run("make_dist.py", "--variants", given.variants)
    if shutil.which("dpkg-deb") and Path(given.python).exists():
        run("make_deb.py", "--python", given.python)
    else:
        print(
            f"No dpkg-deb or no {given.python} here: this release is without a Debian package.",
            file=sys.stderr,
        )
    run("make_formula.py")
    shutil.copy(_HERE / "install.sh", DIST)
    write_checksums(DIST)
    print(f"A release is in {DIST}. Install it: sh dist/install.sh")
    return 0


def run(script: str, *words: str) -> None:
    """Run one of the scripts beside this one."""
    subprocess.run([sys.executable, str(_HERE / script), *words], check=True)


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS of all files in `folder`, in the format of sha256sum."""
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS"
    )
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
