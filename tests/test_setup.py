"""The set-up script: what it asks for, what it compiles with, and how it fails."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Return the script's modules, freshly imported, as they import each other."""
    names = ("toolchain", "watched", "setup")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS", "CC", "CXX", "SOURCE_DATE_EPOCH"):
        monkeypatch.delenv(name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_the_wheel_is_keyed_by_what_changes_it(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other CMAKE_ARGS are another library; another home folder is not."""
    key = scripts["setup"].wheel_key
    first = key()
    monkeypatch.setenv("HOME", "/elsewhere")
    assert key() == first
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert key() != first


def test_the_users_cmake_arguments_come_last(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CMake takes the last word, so the user has it."""
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    words = scripts["setup"].build_environment()["CMAKE_ARGS"].split()
    assert words[0] == "-DLLAVA_BUILD=OFF"
    assert words[-1] == "-DGGML_CUDA=on"


def test_a_source_date_does_not_make_the_library_slow(
    scripts: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With SOURCE_DATE_EPOCH ggml would use no feature of the processor, and not say so."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert "SOURCE_DATE_EPOCH" not in scripts["setup"].build_environment()
    assert "SOURCE_DATE_EPOCH" in capsys.readouterr().err


def test_a_missing_compiler_is_named_with_what_to_install(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, before anything is downloaded."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    (problem,) = scripts["setup"].missing(llama=True)
    assert problem.startswith("no-such-compiler does not compile C++17")
    assert "sudo apt install g++" in problem
    assert scripts["setup"].missing(llama=False) == []


@pytest.mark.parametrize(
    ("features", "version", "off"),
    [
        ({"amx_tile"}, "12.2.0", True),
        ({"amx_tile"}, "13.2.1", True),
        ({"amx_tile"}, "12.4.0", False),
        ({"amx_tile"}, "13.3.0", False),
        ({"amx_tile"}, "14.1.0", False),
        ({"avx2"}, "12.2.0", False),
        ({"amx_tile"}, "what?", False),
    ],
)
def test_amx_is_left_out_only_where_the_compiler_gets_it_wrong(
    scripts: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    features: set[str],
    version: str,
    off: bool,
) -> None:
    """GCC before 12.4 and 13.3 makes a library that crashes on the first real batch."""
    toolchain = scripts["toolchain"]
    monkeypatch.setattr(toolchain, "cpu_flags", lambda: features)
    monkeypatch.setattr(toolchain, "compiler_version", lambda: f"g++ {version}")
    monkeypatch.setattr(toolchain, "_output", lambda _: f"{version}\n")
    assert bool(toolchain.amx_flags()) is off


def test_what_is_installed_first_leaves_llama_cpp_out(scripts: dict[str, ModuleType]) -> None:
    """The checks need no compile; our own two packages come from the checkout."""
    wanted = scripts["setup"].requirements(extra="test")
    assert any(spec.startswith("trio") for spec in wanted)
    assert any(spec.startswith("pytest-trio") for spec in wanted)
    assert not [spec for spec in wanted if spec.startswith(("llama", "uma"))]
    assert scripts["setup"].llama_requirement().startswith("llama-cpp-python>=")


def test_a_step_that_fails_shows_its_last_words(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the error, the end of the output, and where all of it is."""
    watched = scripts["watched"]
    program = "print('main.cpp:3: error: no'); print('x\\n' * 50); raise SystemExit(3)"
    log = tmp_path / "log"
    with pytest.raises(watched.Failed) as caught:
        watched.watched("Compiling", [sys.executable, "-c", program], log=log)
    assert "Compiling failed with status 3" in str(caught.value)
    assert "main.cpp:3: error: no" in str(caught.value)
    assert str(log) in str(caught.value)
    assert "failed" in capsys.readouterr().err


def test_a_step_that_works_says_so(
    scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, with the time it took."""
    scripts["watched"].watched("Nothing much", [sys.executable, "-c", ""])
    assert capsys.readouterr().err.endswith("Nothing much: 0:00, done\n")


@pytest.mark.parametrize(
    ("there", "extras"), [([], ["sdk"]), (["chromium-browser"], ["sdk", "browser"])]
)
def test_what_drives_a_browser_is_installed_where_there_is_one(
    scripts: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    there: list[str],
    extras: list[str],
) -> None:
    """Under any of its names; a machine without one does not fetch 40 MB for tests that skip."""
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    assert scripts["setup"].extras_of_tests() == extras
