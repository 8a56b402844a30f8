"""Which build of llama.cpp is used, and which is refused."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from uma_trio.backend.bindings import (
    AUTO,
    PACKAGED,
    SOURCE,
    VERSION,
    Build,
    LlamaRefused,
    chosen,
    gpu_of,
)

HERE = Path("/lib")
OURS, THEIRS = Build(PACKAGED, VERSION, HERE), Build(SOURCE, VERSION, HERE)
CUDA = Build(SOURCE, VERSION, HERE, gpu="cuda")
OLD = Build(SOURCE, "0.3.1", HERE)


@pytest.mark.parametrize(
    ("installed", "best"),
    [
        ([OURS, CUDA], CUDA),
        ([OURS, THEIRS], OURS),
        ([THEIRS, OURS], OURS),
        ([THEIRS], THEIRS),
        ([OURS, OLD], OURS),
        ([OLD, OURS], OURS),
    ],
)
def test_a_gpu_comes_first_then_the_packaged_build(installed: list[Build], best: Build) -> None:
    """Who compiled for a GPU wants it used; a build of another version is passed over."""
    assert chosen(AUTO, installed) == best


@pytest.mark.parametrize("build", [OURS, THEIRS])
def test_a_build_that_is_named_is_used(build: Build) -> None:
    """`--llama` decides where both are installed."""
    assert chosen(build.module, [OURS, THEIRS]) == build


@pytest.mark.parametrize(
    ("wanted", "installed", "why"),
    [
        (AUTO, [], "not installed: pip install 'uma-trio\\[cpu\\]'"),
        (PACKAGED, [THEIRS], "only llama_cpp is installed"),
        (SOURCE, [OLD], "0.3.1 is another version than"),
        (AUTO, [OLD], "0.3.1 is another version than"),
        ("/nowhere", [OURS], "nor a folder with libllama"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    wanted: str, installed: list[Build], why: str
) -> None:
    """The message says what is wrong and what to install."""
    with pytest.raises(LlamaRefused, match=why):
        chosen(wanted, installed)


def test_a_folder_of_libraries_is_called_through_an_installed_binding(tmp_path: Path) -> None:
    """A release of llama.cpp with a backend for a GPU needs no compile."""
    for name in ("libllama.so", "libggml-vulkan.so"):
        (tmp_path / name).touch()
    build = chosen(str(tmp_path), [OURS, CUDA])
    assert build == Build(PACKAGED, VERSION, tmp_path, gpu="vulkan", foreign=True)
    assert str(tmp_path) in build.about


@pytest.mark.parametrize(
    ("files", "gpu"),
    [
        (["libggml-base.so", "libggml-cpu.so", "libggml-cpu-haswell.so"], ""),
        (["libggml-cpu.so", "libggml-cuda.so.0"], "cuda"),
        (["libggml-metal.dylib"], "metal"),
        (["libggml-vulkan-shaders.txt"], ""),
    ],
)
def test_a_gpu_is_known_by_the_names_of_libraries(
    tmp_path: Path, files: list[str], gpu: str
) -> None:
    """Two builds must not be loaded into one process, so they are told apart from outside."""
    for name in files:
        (tmp_path / name).touch()
    assert gpu_of(tmp_path) == gpu


@pytest.fixture
def module() -> SimpleNamespace:
    """Return what a binding has that is compared: its library and two structures."""
    pytest.importorskip("llama_cpp")
    from uma_trio.backend._llama_binding import llama

    names = ("_lib", "llama_context_params", "llama_model_params")
    return SimpleNamespace(**{name: getattr(llama, name) for name in names})


def test_the_library_in_use_is_of_the_commit_that_the_binding_is_for(
    module: SimpleNamespace,
) -> None:
    """What it says of itself and what it puts into its structures is what is expected."""
    from uma_trio.backend._llama_binding import problem

    assert problem(module) == ""


@pytest.mark.parametrize("name", ["context", "model"])
def test_a_library_with_other_structures_is_refused(module: SimpleNamespace, name: str) -> None:
    """One field more in front, as between two commits, and every value is another field's."""
    from uma_trio.backend._llama_binding import problem

    ours = getattr(module, f"llama_{name}_params")

    class Shifted(ctypes.Structure):
        _fields_ = (("more", ctypes.c_uint64), *ours._fields_)

    setattr(module, f"llama_{name}_params", Shifted)
    assert problem(module).startswith(f"its {name} parameters differ (")


def test_a_library_that_does_not_say_its_version_is_refused(module: SimpleNamespace) -> None:
    """Every llama.cpp of our commit does."""
    from uma_trio.backend._llama_binding import problem

    module._lib = ctypes.CDLL(None)
    assert problem(module) == "its llama_version is unknown, and not 0.5.0"


@pytest.mark.parametrize(
    ("said", "same"),
    [("0c1e57098", True), ("0c1e570", True), ("0c1e57098ffff", True), ("0c1", False), ("9", False)],
)
def test_a_commit_may_be_shortened_but_not_to_anything(said: str, same: bool) -> None:
    """Git shortens names as it likes, to seven characters at least."""
    pytest.importorskip("llama_cpp")
    from uma_trio.backend._llama_binding import _same_commit

    assert _same_commit(said) is same


@pytest.mark.daemon
def test_a_daemon_that_cannot_use_the_build_that_is_named_says_so(tmp_path: Path) -> None:
    """`serve --llama` names what is used, and nothing else is used in its place."""
    serve = [sys.executable, "-m", "uma_trio", "serve", "--socket", str(tmp_path / "s")]
    command = [*serve, "--http", "off", "--llama", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--llama /nowhere: it is neither uma_trio_llama nor llama_cpp" in done.stderr
