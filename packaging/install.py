"""Install this checkout for one user, with the llama.cpp that `make setup` compiled for this machine.

    .venv/bin/python packaging/install.py [--prefix ~/.local] [--remove]

An environment of its own in PREFIX/share/uma-trio, programs in PREFIX/bin, the manual page and completions in
PREFIX/share. Running it again updates; it replaces the environment only when the new one works.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from share import ROOT, add_share, remove_share

sys.path.insert(0, str(ROOT / "scripts"))

import setup as checkout

PROGRAMS = ("uma-trio", "umad", "uma-cli")


def main() -> int:
    """Install or remove; return the exit status."""
    parser = argparse.ArgumentParser(description="Install this checkout for one user.")
    parser.add_argument("--prefix", type=Path, default=Path("~/.local"))
    parser.add_argument("--remove", action="store_true", help="take away what was installed")
    given = parser.parse_args()
    prefix = given.prefix.expanduser().absolute()
    home = prefix / "share" / "uma-trio"
    if given.remove:
        remove(prefix, home)
        return 0
    wheel = checkout.cached_wheel(checkout.wheel_key())
    if wheel is None:
        print("llama.cpp is not compiled yet; run `make setup` first.", file=sys.stderr)
        return 1
    install(home, wheel)
    link(prefix, home)
    add_share(prefix / "share", home / "bin" / "uma-trio")
    print(f"Installed {prefix / 'bin' / 'uma-trio'}. To remove it: make uninstall")
    if str(prefix / "bin") not in os.environ.get("PATH", "").split(os.pathsep):
        print(f"{prefix / 'bin'} is not on your PATH; add it in your shell's start-up file.")
    return 0


def install(home: Path, llama: Path) -> None:
    """Make the environment at `home` anew; the old one stays if that fails."""
    old = home.with_name("uma-trio.old")
    shutil.rmtree(old, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    if home.exists():
        home.rename(old)  # an environment cannot be moved once it is made
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
        sources = [str(ROOT / "protocol"), str(ROOT), str(llama)]
        subprocess.run([*pip, "install", "--quiet", *sources], check=True)
        subprocess.run([home / "bin" / "uma-trio", "--version"], check=True, capture_output=True)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        if old.exists():
            old.rename(home)
        raise
    shutil.rmtree(old, ignore_errors=True)


def link(prefix: Path, home: Path) -> None:
    """Have the programs in PREFIX/bin."""
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        place = prefix / "bin" / name
        place.unlink(missing_ok=True)
        place.symlink_to(home / "bin" / name)


def remove(prefix: Path, home: Path) -> None:
    """Take away what was installed; settings and models stay."""
    for name in PROGRAMS:
        place = prefix / "bin" / name
        if place.is_symlink() and place.readlink() == home / "bin" / name:
            place.unlink()
    remove_share(prefix / "share")
    shutil.rmtree(home, ignore_errors=True)
    print("Removed. Settings (~/.config/uma-trio) and models are kept.")


if __name__ == "__main__":
    sys.exit(main())
