"""Make a Debian package of what is in dist/, with an environment of its own in /opt/uma-trio.

    python packaging/make_deb.py [--python /usr/bin/python3]

Debian's own packages of what uma-trio depends on are too old. The interpreter is the system's, so the package
fits the Debian release whose Python makes it. Needs dpkg-deb, and dist/ from `make dist`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from share import ROOT, add_share

from uma_trio import __version__
from uma_trio.cli.units import systemd_units
from uma_trio.config.options import Config

DIST, TREE = ROOT / "dist", ROOT / "build" / "deb"
HOME = Path("/opt/uma-trio")
PROGRAMS = ("uma-trio", "umad", "uma-cli")
_CONTROL = """\
Package: uma-trio
Version: {version}-1
Architecture: {architecture}
Maintainer: the authors of uma-trio <uma-trio@users.noreply.github.com>
Section: misc
Priority: optional
Installed-Size: {kib}
Depends: python3 (>= {python}), python3 (<< {next_python}), libc6 (>= 2.34), libstdc++6 (>= 12)
Homepage: https://github.com/uma-trio/uma-trio
Description: one language model in memory for all programs of a machine
 uma-trio loads one GGUF model once, with llama.cpp, and serves every program of
 the machine over a Unix socket and over HTTP, with continuous batching.
"""
# Without units of the system there is nothing to start: the service is each user's.
_POSTINST = """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    /opt/uma-trio/bin/uma-trio doctor || true
    echo "For each user: systemctl --user enable --now uma-trio.socket"
fi
"""
# What Python compiled while it ran is not dpkg's.
_PRERM = """\
#!/bin/sh
set -e
find /opt/uma-trio -name __pycache__ -type d -prune -exec rm -rf {} +
"""


def main() -> int:
    """Make the package; return the exit status."""
    parser = argparse.ArgumentParser(description="Make a Debian package of dist/.")
    parser.add_argument("--python", default="/usr/bin/python3")
    given = parser.parse_args()
    shutil.rmtree(TREE, ignore_errors=True)
    home = TREE / HOME.relative_to("/")
    environment(home, given.python)
    add_share(TREE / "usr" / "share", home / "bin" / "uma-trio")
    page = TREE / "usr" / "share" / "man" / "man1" / "uma-trio.1"
    subprocess.run(["gzip", "-9n", str(page)], check=True)
    relocate(home)
    programs(TREE / "usr" / "bin")
    write_units(TREE / "usr" / "lib" / "systemd" / "user")
    control(given.python)
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(TREE), str(DIST)]
    subprocess.run(command, check=True)
    return 0


def environment(home: Path, python: str) -> None:
    """Install the artefacts into an environment at `home`; what they depend on comes from the index."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(home)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    options = ["--quiet", "--only-binary", ":all:", "--no-compile", "--find-links", str(DIST)]
    subprocess.run([*pip, *options, f"uma-trio[cpu]=={__version__}"], check=True)


def relocate(home: Path) -> None:
    """Have the programs start with the interpreter where it will be."""
    for cache in home.rglob("__pycache__"):
        shutil.rmtree(cache)
    for script in (home / "bin").iterdir():
        if not script.is_symlink():
            text = script.read_text(encoding="utf-8").replace(str(home), str(HOME))
            script.write_text(text, encoding="utf-8")
    config = home / "pyvenv.cfg"
    lines = config.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("command")]
    config.write_text("\n".join(kept) + "\n", encoding="utf-8")


def programs(folder: Path) -> None:
    """Have the programs on everybody's PATH."""
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        (folder / name).symlink_to(HOME / "bin" / name)


def write_units(folder: Path) -> None:
    """Write the units of a user's manager; without an HTTP port, which settings name."""
    folder.mkdir(parents=True)
    units = systemd_units(HOME / "bin" / "uma-trio", None, Config().drain_s)
    for name, text in units.items():
        (folder / name).write_text(text, encoding="utf-8")


def control(python: str) -> None:
    """Write what dpkg has to know."""
    folder = TREE / "DEBIAN"
    folder.mkdir()
    ask = "import sys; print(*sys.version_info[:2])"
    major, minor = map(int, _output(python, "-c", ask).split())
    size = sum(file.lstat().st_size for file in TREE.rglob("*") if file.is_file())
    text = _CONTROL.format(
        version=__version__,
        architecture=_output("dpkg", "--print-architecture").strip(),
        kib=size // 1024,
        python=f"{major}.{minor}",
        next_python=f"{major}.{minor + 1}",
    )
    (folder / "control").write_text(text, encoding="utf-8")
    for name, script in (("postinst", _POSTINST), ("prerm", _PRERM)):
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
