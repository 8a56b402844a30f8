"""Build the wheels and source distributions of the four distributions into dist/, and check them.

    python packaging/make_dist.py [--only wheels] [--variants "x64 haswell"]

Each wheel is built from its source distribution. `--variants` names the CPU backends of uma-trio-llama, all of
them by default, which takes long; what is compiled is kept beside the wheels of `make setup`. Needs a C++17
compiler and an index.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from share import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import setup as checkout

DIST, TOOLS = ROOT / "dist", ROOT / "build" / "tools"
LLAMA = ROOT / "packaging" / "llama"
EVERY = (ROOT / "protocol", ROOT, ROOT / "sim", ROOT / "cluster", LLAMA)
_NEEDED = (
    "build>=1.2",
    "twine>=6",
    "auditwheel>=6.1; sys_platform == 'linux'",
    "uv>=0.9",
    "pipx>=1.7",
)


def main() -> int:
    """Make dist/ anew; return the exit status."""
    parser = argparse.ArgumentParser(description="Build the distributions into dist/.")
    parser.add_argument("--variants", default="", help="CPU backends, such as 'x64 haswell'")
    parser.add_argument("--only", choices=("wheels",), help="wheels: uma-trio-llama's wheel alone")
    given = parser.parse_args()
    python = tools()
    shutil.rmtree(DIST, ignore_errors=True)
    env = {**os.environ, "UMA_TRIO_LLAMA_VARIANTS": given.variants}
    env.setdefault("UMA_TRIO_LLAMA_BUILD", str(checkout.CACHE / "llama"))
    env["PATH"] = os.pathsep.join([str(TOOLS / "bin"), env.get("PATH", os.defpath)])
    for project in (LLAMA,) if given.only else EVERY:
        kind = ["--wheel"] if given.only else []
        command = [python, "-m", "build", "--no-isolation", *kind, "--outdir", str(DIST)]
        subprocess.run([*command, str(project)], env=env, check=True)
    made = sorted(map(str, DIST.iterdir()))
    subprocess.run([python, "-m", "twine", "check", "--strict", *made], check=True)
    if sys.platform.startswith("linux"):
        for wheel in DIST.glob("uma_trio_llama-*.whl"):
            audit(python, wheel)
    return 0


def tools() -> str:
    """Return the Python of an environment with what builds, checks and tries distributions.

    One for all: an environment for each of them would fetch and install the same again.
    """
    python = TOOLS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(TOOLS)], check=True)
    backends = {need for project in EVERY for need in build_requirements(project)}
    wanted = [*_NEEDED, *sorted(backends)]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return str(python)


def build_requirements(project: Path) -> list[str]:
    """Return what a distribution is built with, as it says; `build` refuses to begin without them."""
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["build-system"]["requires"])


def audit(python: str, wheel: Path) -> None:
    """See that a wheel keeps what its name promises of the systems that it runs on."""
    command = [python, "-m", "auditwheel", "show", str(wheel)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tag = wheel.stem.rpartition("-")[2]
    if f'"{tag}"' not in " ".join(said.split()):
        raise SystemExit(f"{wheel.name} does not fit its tag:\n{said}")
    print(f"auditwheel: {wheel.name} is {tag}")


if __name__ == "__main__":
    sys.exit(main())
