"""What is packaged: versions that belong together, links that lead somewhere, scripts that tidy up."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from uma_trio.backend import bindings

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"


def project(folder: Path) -> dict[str, Any]:
    """Return what a pyproject.toml says."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def packaging(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return the scripts of packaging/, as they import each other."""
    for folder in (ROOT / "scripts", PACKAGING, PACKAGING / "llama"):
        monkeypatch.syspath_prepend(str(folder))
    names = ("llama_build", "make_dist", "make_formula", "make_release", "share")
    for name in (*names, "toolchain", "setup", "watched"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in names}


def test_the_packaged_llama_is_the_one_that_the_backend_is_for(
    packaging: dict[str, ModuleType],
) -> None:
    """One version of the binding and one commit, wherever they are written."""
    build, wanted = packaging["llama_build"], project(ROOT)["project"]["optional-dependencies"]
    assert build.VERSION == bindings.VERSION == project(PACKAGING / "llama")["project"]["version"]
    assert build.COMMIT == bindings.COMMIT
    assert f'"{bindings.VERSION}"' in (
        PACKAGING / "llama" / "uma_trio_llama" / "__init__.py"
    ).read_text(encoding="utf-8")
    for extra, name in (("cpu", "uma-trio-llama"), ("source", "llama-cpp-python")):
        (requirement,) = wanted[extra]
        assert requirement.startswith(f"{name}>={bindings.VERSION},<")


@pytest.mark.parametrize(
    "folder",
    [ROOT, ROOT / "protocol", ROOT / "sim", ROOT / "cluster"],
    ids=["uma-trio", "uma-protocol", "uma-trio-sim", "uma-trio-cluster"],
)
def test_links_of_a_readme_are_absolute_on_an_index(folder: Path) -> None:
    """There is no folder docs/ beside it there."""
    hook = project(folder)["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (folder / "README.md").read_text(encoding="utf-8")
    for rule in hook["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    assert len(re.findall(r"\]\(https://", text)) > 1
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []
    assert re.findall(r"!\[[^\]]*\]\((?!https://raw\.)[^)]*\)", text) == [], (
        "no picture, but a page about it"
    )


@pytest.mark.parametrize("extra", ["sim", "cluster"])
def test_a_plugged_in_distribution_has_the_version_of_the_daemon(extra: str) -> None:
    """One version wherever it is written: both distributions, the extra and the requirement."""
    daemon, plugged = project(ROOT)["project"], project(ROOT / extra)["project"]
    assert daemon["version"] == plugged["version"]
    assert plugged["dependencies"] == [f"uma-trio=={daemon['version']}"]
    assert daemon["optional-dependencies"][extra] == [f"uma-trio-{extra}=={daemon['version']}"]


def test_the_tag_of_a_wheel_is_the_newest_glibc_that_a_library_needs(
    packaging: dict[str, ModuleType], tmp_path: Path
) -> None:
    """A build on a newer system must not be installed on an older one."""
    build = packaging["llama_build"]
    (tmp_path / "a.so").write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.17\0")
    assert build.platform_tag(tmp_path).startswith("manylinux_2_34_")
    (tmp_path / "b.so").write_bytes(b"\0GLIBC_2.38\0")
    assert build.platform_tag(tmp_path).startswith("manylinux_2_38_")


def test_what_was_compiled_is_used_again_unless_something_changes_it(
    packaging: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other flags, or other variants, the compiler runs."""
    build = packaging["llama_build"]

    def no_source(_: Path) -> Path:
        raise RuntimeError("compiles")

    monkeypatch.setattr(build, "_unpacked", no_source)
    monkeypatch.delenv("CXXFLAGS", raising=False)
    made = tmp_path / build.key() / "package-haswell-x64"
    made.mkdir(parents=True)
    assert build.build(tmp_path, ["x64", "haswell"]) == made
    with pytest.raises(RuntimeError, match="compiles"):
        build.build(tmp_path, ["x64"])
    monkeypatch.setenv("CXXFLAGS", "-O1")
    with pytest.raises(RuntimeError, match="compiles"):
        build.build(tmp_path, ["x64", "haswell"])


def test_a_formula_names_the_archive_and_its_digest(
    packaging: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Nothing of the template is left open."""
    archive = tmp_path / "uma_trio-9.8.7.tar.gz"
    archive.write_bytes(b"an archive")
    text = packaging["make_formula"].formula(archive)
    assert "/v9.8.7/uma_trio-9.8.7.tar.gz" in text
    assert re.search(r'sha256 "[0-9a-f]{64}"', text)
    assert not re.search(r"@[A-Z0-9]+@", text)


def test_a_formula_is_ruby(packaging: dict[str, ModuleType], tmp_path: Path) -> None:
    """By Ruby's own word where there is one; else each block that begins ends."""
    archive = tmp_path / "uma_trio-9.8.7.tar.gz"
    archive.write_bytes(b"an archive")
    text = packaging["make_formula"].formula(archive)
    ruby = shutil.which("ruby")
    if ruby is not None:
        subprocess.run([ruby, "-c"], input=text, text=True, check=True, capture_output=True)
    lines = [line.strip() for line in text.splitlines()]
    begins = [
        line for line in lines if re.match(r"(class|def|begin)\b", line) or line.endswith(" do")
    ]
    assert len(begins) == lines.count("end")
    for opened, closed in ("()", "[]", "{}"):
        assert text.count(opened) == text.count(closed)


def run_installer(prefix: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run packaging/install.sh without uv on the PATH, and with an index that has nothing."""
    command = ["sh", str(PACKAGING / "install.sh"), "--prefix", str(prefix), *words]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(prefix), "PYTHON": sys.executable}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(command, env=env, text=True, capture_output=True, check=False)


def release_folder(folder: Path, content: bytes) -> Path:
    """Make a release whose wheels hold `content`."""
    folder.mkdir()
    sums = []
    for name in ("uma_trio-1.0-py3-none-any.whl", "uma_protocol-1.0-py3-none-any.whl", LLAMA_WHEEL):
        (folder / name).write_bytes(content)
        sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    return folder


LLAMA_WHEEL = f"uma_trio_llama-1.0-py3-none-manylinux_2_34_{os.uname().machine}.whl"


def installed(prefix: Path) -> Path:
    """Lay out an installation as install.sh does, with a file that tells it from a new one."""
    home = prefix / "share" / "uma-trio"
    (home / "bin").mkdir(parents=True)
    (prefix / "bin").mkdir()
    for name in ("uma-trio", "umad", "uma-cli"):
        (home / "bin" / name).touch()
        (prefix / "bin" / name).symlink_to(home / "bin" / name)
    return home


def test_removing_leaves_what_is_not_ours(tmp_path: Path) -> None:
    home = installed(tmp_path)
    (tmp_path / "bin" / "umad").unlink()
    (tmp_path / "bin" / "umad").write_text("another's", encoding="utf-8")
    assert run_installer(tmp_path, "--remove").returncode == 0
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["umad"]
    assert not home.exists()


def test_an_installation_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    home = installed(tmp_path)
    (home / "old").touch()
    release = release_folder(tmp_path / "release", b"no wheel")
    assert run_installer(tmp_path, "--from", str(release)).returncode != 0
    assert [path.name for path in home.parent.iterdir()] == ["uma-trio"]
    assert (home / "old").exists()


def test_a_damaged_file_of_a_release_is_named_and_not_installed(tmp_path: Path) -> None:
    release = release_folder(tmp_path / "release", b"a wheel")
    (release / LLAMA_WHEEL).write_bytes(b"a whe")
    done = run_installer(tmp_path, "--from", str(release))
    assert done.returncode != 0
    assert f"{LLAMA_WHEEL} from {release} is damaged" in done.stderr
    assert not (tmp_path / "share").exists()


@pytest.mark.parametrize("source", ["nowhere", "http://127.0.0.1:1"])
def test_a_place_without_a_release_is_named(tmp_path: Path, source: str) -> None:
    done = run_installer(tmp_path, "--from", source)
    assert done.returncode != 0
    assert f"no release at {source}" in done.stderr


def test_the_checksums_of_a_release_are_those_of_sha256sum(
    packaging: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "a.whl").write_bytes(b"a")
    packaging["make_release"].write_checksums(tmp_path)
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, check=True)


def test_the_wheel_has_every_file_of_the_page() -> None:
    """The static files, and the licences of the libraries among them."""
    built = {each.distribution_path for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    folder = "uma_trio/http/page/static"
    every = {str(each.relative_to(ROOT)) for each in (ROOT / folder).rglob("*") if each.is_file()}
    assert f"{folder}/vendor/katex/LICENSE" in every
    assert every <= built
