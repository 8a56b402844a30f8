"""Make `.venv` ready to run uma-trio: packages, llama.cpp, and nothing that is there already.

    python scripts/setup.py [--no-llama] [--sdk]

Standard library only. Uses uv where it is on PATH and pip where not. llama-cpp-python comes as
source, so its wheel is compiled once for this machine and kept outside the checkout, keyed by
everything that changes what is compiled. Run again, it does nothing and says nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from toolchain import (
    amx_flags,
    compiler,
    compiler_version,
    cpu_identity,
    has_cpp17,
    jobs,
)
from watched import Failed, watched

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
NODE = VENV / "node"  # tests/test_http_sdk.py looks for node_modules there
# Beside OpenAI's client: what tests of the page use for accessibility, and to drive Firefox.
NODE_PACKAGES = ("openai@^7", "axe-core@4.14.1", "puppeteer-core@25.16.0")
STAMP = VENV / "uma-trio-setup.json"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
LLAMA = "llama-cpp-python"
OURS = ("protocol", "sim", "cluster")  # distributions of their own beside uma-trio
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "uma-trio"
# What we compile is only what is loaded; the user's own CMAKE_ARGS come last and win.
CMAKE_ARGS = (
    "-DLLAVA_BUILD=OFF",
    f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={ROOT}/scripts/llama-only.cmake",
)


def main() -> int:
    """Bring `.venv` up to date; return the exit status."""
    parser = argparse.ArgumentParser(description="Make .venv ready to run uma-trio.")
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out, for checks")
    parser.add_argument("--sdk", action="store_true", help="with the clients that tests run")
    given = parser.parse_args()
    llama = not given.no_llama
    stamp = read_stamp()
    packages, engine = packages_key(), wheel_key() if llama else None
    wanted = {"packages": packages}
    if llama:
        wanted["llama"] = str(engine)
    extras = extras_of_tests() if given.sdk else []
    wanted |= dict.fromkeys(extras, packages)
    if wanted.items() <= stamp.items():
        return 0
    problems = missing(llama=llama and not cached_wheel(engine))
    if problems:
        say("uma-trio cannot be set up here yet:")
        for problem in problems:
            say(f"  - {problem}")
        return 1
    try:
        if stamp.get("packages") != packages:
            install_packages_somehow()
            stamp = {**read_stamp(), "packages": packages}
            write_stamp(stamp)
        if llama and engine and stamp.get("llama") != engine:
            install_llama(engine)
            stamp = {**stamp, "llama": engine}
            write_stamp(stamp)
        for extra in extras:
            if stamp.get(extra) != packages:
                install_extra(extra)
                stamp = {**stamp, extra: packages}
                write_stamp(stamp)
    except Failed as failure:
        say(str(failure))
        return 1
    say("Set up. Next: make demo, or .venv/bin/uma-trio serve")
    return 0


def say(text: str) -> None:
    """Tell the person in front, at once."""
    print(text, file=sys.stderr, flush=True)


def missing(*, llama: bool) -> list[str]:
    """Return one sentence for each thing that is not here, with what to do about it."""
    problems = []
    if not uv_path() and not PYTHON.exists() and importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        problems.append(
            f"Python {version} has no venv module: sudo apt install python{version}-venv "
            "(or install uv)."
        )
    if llama and not has_cpp17():
        problems.append(
            f"{compiler()} does not compile C++17, which llama.cpp needs: "
            "sudo apt install g++ (macOS: xcode-select --install), or set CXX."
        )
    if llama and not (shutil.which("make") or shutil.which("ninja")):
        problems.append(
            "neither make nor ninja is here, to compile llama.cpp: sudo apt install make."
        )
    return problems


def packages_key() -> str:
    """Return a digest of everything the installed packages depend on."""
    digest = hashlib.sha256(sys.version.encode())
    projects = (ROOT, *(ROOT / name for name in OURS))
    for path in (*(project / "pyproject.toml" for project in projects), Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(str(ROOT).encode())
    return digest.hexdigest()[:16]


def wheel_key() -> str:
    """Return a digest of everything that changes the compiled library."""
    parts = {
        "requirement": llama_requirement(),
        "cmake": os.environ.get("CMAKE_ARGS", ""),
        "ours": [part for part in CMAKE_ARGS if str(ROOT) not in part],
        "include": (ROOT / "scripts" / "llama-only.cmake").read_text(encoding="utf-8"),
        "flags": [os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "CC", "CXX")],
        "compiler": compiler_version(),
        "cpu": cpu_identity(),
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def requirements(*, extra: str) -> list[str]:
    """Return what pyproject asks for from the index, less our own packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    every = [*project["dependencies"], *project["optional-dependencies"][extra]]
    return [spec for spec in every if not spec.startswith("uma-protocol")]


def llama_requirement() -> str:
    """Return pyproject's requirement on llama-cpp-python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = project["optional-dependencies"]["source"]
    return str(requirement)


def install_packages_somehow() -> None:
    """Install with uv where it is; should that fail, as pip is set up.

    A mirror or certificate that pip.conf names is not known to uv.
    """
    try:
        install_packages()
    except Failed as failure:
        if not uv_path():
            raise
        say(f"{failure}\nuv could not do it; trying pip.")
        os.environ["UMA_TRIO_SETUP_NO_UV"] = "1"
        shutil.rmtree(VENV, ignore_errors=True)
        install_packages()


def uv_path() -> str | None:
    """Return where uv is, if it is to be used."""
    return None if os.environ.get("UMA_TRIO_SETUP_NO_UV") else shutil.which("uv")


def install_packages() -> None:
    """Create the environment and install everything but llama.cpp."""
    uv = uv_path()
    if not PYTHON.exists():
        command = (
            [uv, "venv", "--seed", "--python", sys.executable, str(VENV)]
            if uv
            else [sys.executable, "-m", "venv", str(VENV)]
        )
        watched("Creating .venv", command)
    # Editable packages are built by hatchling and editables; named here, they need no isolated
    # environment each, which would fetch them again.
    build = ["hatchling>=1.26", "hatch-fancy-pypi-readme>=24.1", "editables>=0.5"]
    wanted = [*requirements(extra="test"), *build]
    watched("Installing Python packages", [*installer(), *wanted])
    each = [part for name in (*OURS, ".") for part in ("-e", str(ROOT / name))]
    ours = ["--no-deps", "--no-build-isolation", *each]
    watched("Installing uma-trio itself", [*installer(), *ours])


def extras_of_tests() -> list[str]:
    """Return the extras that tests run: client packages, and what drives a browser where there is one."""
    return ["sdk", "browser"] if any(map(shutil.which, CHROMIUM)) else ["sdk"]


def install_extra(name: str) -> None:
    """Install an extra that tests run, and with the client packages OpenAI's for Node where npm is."""
    watched(f"Installing packages for tests ({name})", [*installer(), *requirements(extra=name)])
    if name == "sdk" and shutil.which("node") and shutil.which("npm"):
        command = ["npm", "install", "--prefix", str(NODE), "--ignore-scripts", "--no-fund"]
        watched("Installing packages for Node", [*command, "--no-audit", *NODE_PACKAGES])


def installer() -> list[str]:
    """Return the command that installs into `.venv`."""
    uv = uv_path()
    if uv:
        return [uv, "pip", "install", "--python", str(PYTHON)]
    return [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]


def cached_wheel(key: str | None) -> Path | None:
    """Return the wheel compiled for this key, if there is one."""
    return next(iter(sorted((CACHE / "wheels" / str(key)).glob("*.whl"))), None)


def install_llama(key: str) -> None:
    """Compile llama-cpp-python unless the cache has it, install it, and see that it loads."""
    wheel = cached_wheel(key) or build_wheel(key)
    # --no-deps: its dependencies are ours, and installed; --force-reinstall: the version
    # says nothing about how it was compiled.
    flags = ["--no-deps", "--reinstall" if uv_path() else "--force-reinstall"]
    watched("Installing llama.cpp", [*installer(), *flags, str(wheel)])
    extra = ["diskcache>=5.6.1", "typing-extensions>=4.5"]
    watched("Installing what llama.cpp's package needs", [*installer(), *extra])
    probe = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
    result = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, text=True, check=False)
    if result.returncode:
        text = (
            f"llama.cpp was installed and does not load (exit {result.returncode}): "
            f"{result.stderr.strip()[-400:]}\nRemove {wheel} and run this again."
        )
        raise Failed(text)
    say(f"llama.cpp uses: {result.stdout.strip()}")


def build_wheel(key: str) -> Path:
    """Compile the wheel into the cache and return it."""
    home = CACHE / "wheels" / key
    home.parent.mkdir(parents=True, exist_ok=True)
    log = home.parent / f"{key}.log"
    env = build_environment()
    say(
        f"llama.cpp has to be compiled, once for this machine ({env['CMAKE_BUILD_PARALLEL_LEVEL']} "
        f"jobs; log in {log})."
    )
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f"{key}.") as folder:
        command = [
            *[str(PYTHON), "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose"],
            # pip's own cache keys a built wheel by version alone: other CMAKE_ARGS would
            # silently get the old one.
            *["--no-cache-dir", "--no-deps", "--no-binary", LLAMA, "--wheel-dir", folder],
            llama_requirement(),
        ]
        watched("Compiling llama.cpp (1 to 8 minutes)", command, env=env, log=log)
        Path(folder).chmod(0o755)
        if home.exists():
            shutil.rmtree(home)
        shutil.copytree(folder, home)
    (home / "how.json").write_text(
        json.dumps({"CMAKE_ARGS": env["CMAKE_ARGS"], "cpu": cpu_identity()}, indent=1),
        encoding="utf-8",
    )
    wheel = cached_wheel(key)
    if wheel is None:
        text = f"The compile left no wheel in {home}; see {log}."
        raise Failed(text)
    return wheel


def build_environment() -> dict[str, str]:
    """Return the environment of the compile."""
    env = dict(os.environ)
    # With SOURCE_DATE_EPOCH set, ggml turns off every instruction set of this CPU, silently,
    # and the library is many times slower.
    if env.pop("SOURCE_DATE_EPOCH", None):
        say("SOURCE_DATE_EPOCH is set; it is ignored here, it would make llama.cpp slow.")
    flags = amx_flags()
    if flags:
        say("This compiler miscompiles AMX (GCC PR 114098); llama.cpp is built without it.")
        for name in ("CFLAGS", "CXXFLAGS"):
            env[name] = f"{env.get(name, '')} {flags}".strip()
    quoted = [f'"{part}"' if " " in part else part for part in CMAKE_ARGS]
    env["CMAKE_ARGS"] = " ".join([*quoted, env.get("CMAKE_ARGS", "")]).strip()
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs()))
    return env


def read_stamp() -> dict[str, str]:
    """Return what was set up last, or nothing if `.venv` is not whole."""
    if not PYTHON.exists():
        return {}
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in stamp.items()}


def write_stamp(stamp: dict[str, str]) -> None:
    """Remember what was set up."""
    STAMP.write_text(json.dumps(stamp, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
