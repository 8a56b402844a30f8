"""Fill in Homebrew's formula for the source archive in dist/: dist/uma-trio.rb, for a tap of our own.

python packaging/make_formula.py [--url https://.../uma_trio-0.1.0.tar.gz]
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TEMPLATE = ROOT / "packaging" / "homebrew" / "uma-trio.rb.in"
_RELEASES = "https://github.com/uma-trio/uma-trio/releases/download"


def main() -> int:
    """Write the formula; return the exit status."""
    parser = argparse.ArgumentParser(description="Fill in Homebrew's formula.")
    parser.add_argument("--url", default="", help="where the source archive will be")
    given = parser.parse_args()
    archives = sorted(DIST.glob("uma_trio-*.tar.gz"))
    if not archives:
        print("There is no source archive in dist/; run `make dist` first.", file=sys.stderr)
        return 1
    (DIST / "uma-trio.rb").write_text(formula(archives[-1], given.url), encoding="utf-8")
    return 0


def formula(archive: Path, url: str = "") -> str:
    """Return the formula of a source archive that can be fetched from `url`."""
    version = archive.name.removeprefix("uma_trio-").removesuffix(".tar.gz")
    where = url or f"{_RELEASES}/v{version}/{archive.name}"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("@URL@", where).replace("@SHA256@", digest)


if __name__ == "__main__":
    sys.exit(main())
