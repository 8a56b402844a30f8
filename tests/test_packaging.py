"""What is packaged: versions that belong together, links that lead somewhere, scripts that tidy up."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
    names = ("llama_build", "install", "make_formula", "share")
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


def test_removing_leaves_what_is_not_ours(packaging: dict[str, ModuleType], tmp_path: Path) -> None:
    """A program of the same name that somebody else put there stays."""
    home = tmp_path / "share" / "uma-trio"
    (home / "bin").mkdir(parents=True)
    packaging["install"].link(tmp_path, home)
    assert (tmp_path / "bin" / "umad").readlink() == home / "bin" / "umad"
    (tmp_path / "bin" / "umad").unlink()
    (tmp_path / "bin" / "umad").write_text("another's", encoding="utf-8")
    packaging["install"].remove(tmp_path, home)
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["umad"]
    assert not home.exists()


def test_an_installation_that_fails_leaves_the_old_one(
    packaging: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is all or nothing."""

    def fail(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(1, "pip")

    home = tmp_path / "uma-trio"
    home.mkdir()
    (home / "old").touch()
    monkeypatch.setattr(packaging["install"].subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        packaging["install"].install(home, tmp_path / "llama.whl")
    assert [path.name for path in tmp_path.iterdir()] == ["uma-trio"]
    assert (home / "old").exists()
