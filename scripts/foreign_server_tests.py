"""Run llama.cpp's own server tests against this daemon and the bundled model.

    .venv/bin/python scripts/foreign_server_tests.py [--sources DIR] [-k EXPRESSION] [--fetch] [--short] [-v]

The tests are those of ``tools/server/tests`` in the sources of llama.cpp from which the daemon's
library is compiled. ``foreign_server_plugin.py`` replaces the server's command line, the model and
what depends on the model; ``foreign_server_tests.toml`` lists all replacements, every documented
difference with its reason, and what is not served. The exit status is 1 if a test failed, or if a
documented difference is none any more.

The sources are unpacked once, beside the compiled wheels. Without them the source distribution is
downloaded (77 MB); `--sources` names an unpacked llama.cpp instead. Needs `pip install ".[test,sdk]"`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from setup import CACHE, LLAMA, ROOT, llama_requirement

HERE = Path(__file__).resolve().parent
TESTS = Path("tools/server/tests")
NEEDED = (f"{TESTS}/", "models/templates/", "models/ggml-vocab-")


def main() -> int:
    """Run the tests; return pytest's exit status."""
    parser = argparse.ArgumentParser(description="Run llama.cpp's server tests against uma-trio.")
    parser.add_argument("--sources", type=Path, help="an unpacked llama.cpp")
    parser.add_argument(
        "--fetch", action="store_true", help="only fetch the sources, whose templates tests render"
    )
    parser.add_argument("--short", action="store_true", help="one file of each API, for CI")
    parser.add_argument("-k", dest="expression", default="", help="run only matching tests")
    parser.add_argument("-v", dest="verbose", action="store_true", help="name each test")
    given = parser.parse_args()
    sources = given.sources or unpacked()
    if given.fetch:
        return 0
    command = [sys.executable, "-m", "pytest", "-p", "foreign_server_plugin", "--noconftest"]
    command += [
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "-q",
        "--tb=short",
    ]
    command += ["-k", given.expression] if given.expression else []
    command += ["-vv"] if given.verbose else []
    command += ["--foreign-short"] if given.short else []
    paths = os.pathsep.join([str(HERE), ".", str(ROOT)])
    with tempfile.TemporaryDirectory(prefix="uma-foreign-") as folder:
        env = {**os.environ, "PYTHONPATH": paths, "UMA_FOREIGN": folder}
        return subprocess.run(
            [*command, "unit"], cwd=sources / TESTS, env=env, check=False
        ).returncode


def unpacked() -> Path:
    """Return the folder with the needed part of llama.cpp's sources; fetch it the first time."""
    version = installed_version()
    folder = CACHE / "sources" / f"{LLAMA}-{version}"
    if folder.is_dir():
        return folder
    print(f"Fetching the sources of {LLAMA} {version} for their tests", file=sys.stderr)
    with tempfile.TemporaryDirectory() as download:
        fetch = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            download,
        ]
        subprocess.run([*fetch, "--no-binary", LLAMA, f"{LLAMA}=={version}"], check=True)
        (archive,) = Path(download).glob("*.tar.gz")
        partial = Path(download) / "llama.cpp"
        unpack(archive, partial)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(partial, folder)
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Write the tests, the chat templates and the vocabularies of an archive into `folder`."""
    with tarfile.open(archive) as tar:
        for member in tar:
            _, found, path = member.name.partition("/vendor/llama.cpp/")
            if found and member.isfile() and path.startswith(NEEDED):
                member.name = path
                tar.extract(member, folder, filter="data")


def installed_version() -> str:
    """Return the version of the installed library; the least that is required if there is none."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "show", LLAMA], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"^Version: (\S+)", shown, re.MULTILINE) or re.search(
        r">=([\d.]+)", llama_requirement()
    )
    if found is None:
        raise SystemExit(f"no version of {LLAMA} is installed or required")
    return found.group(1)


if __name__ == "__main__":
    sys.exit(main())
