"""`uma-trio embed` and `uma-trio rerank` as a shell sees them, against a real daemon with real encoders."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from cli_kit import command, environment

from models.encoders import EncoderShape, write_encoder

pytestmark = pytest.mark.real

PATIENCE_S = 60


@pytest.fixture(scope="module")
def where() -> Iterator[Path]:
    """Return the socket of a daemon with an embedder and a reranker."""
    with tempfile.TemporaryDirectory(prefix="uma-") as made:
        folder = Path(made)
        embedder = write_encoder(folder / "embedder.gguf", name="embedder")
        ranker = write_encoder(folder / "ranker.gguf", EncoderShape(pooling="rank"), name="ranker")
        start = [sys.executable, str(Path(__file__).with_name("fake_daemon.py")), str(folder / "s")]
        start += [f"embedding_model={embedder}", f"rerank_model={ranker}", "threads=1"]
        daemon = subprocess.Popen(
            start, stdout=subprocess.PIPE, env=environment(PYTHONPATH=os.pathsep.join(sys.path))
        )
        with daemon:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"ready\n"
            yield folder / "s"
            daemon.terminate()


def said(
    where: Path, *arguments: str, stdin: str = "", cwd: Path | None = None
) -> tuple[int, str, str]:
    """Return status, output and errors of a command."""
    done = subprocess.run(
        command("uma-trio", *arguments),
        input=stdin.encode(),
        capture_output=True,
        check=False,
        cwd=cwd,
        timeout=PATIENCE_S,
        env=environment(UMA_SOCK=str(where), PYTHONPATH=os.pathsep.join(sys.path)),
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def lines(text: str) -> list[dict[str, Any]]:
    """Return the objects of lines of JSON."""
    return [json.loads(line) for line in text.splitlines()]


def test_each_text_has_a_line_with_its_vector(where: Path) -> None:
    """Of length 1, in the order of the arguments; the same text has the same vector."""
    status, out, errors = said(where, "embed", "a fox", "the sea", "a fox")
    assert (status, errors) == (0, "")
    found = lines(out)
    assert [(each["index"], each["text"]) for each in found] == [
        (0, "a fox"),
        (1, "the sea"),
        (2, "a fox"),
    ]
    for each in found:
        assert sum(x * x for x in each["embedding"]) == pytest.approx(1, abs=1e-4)
    assert found[0]["embedding"] == pytest.approx(found[2]["embedding"], abs=1e-4)


def test_texts_come_from_lines_and_files(where: Path, tmp_path: Path) -> None:
    """A line each on standard input, empty ones left out; a file is one text, which results name."""
    status, out, _ = said(where, "embed", stdin="one\n\n  \ntwo\n" + "more\n" * 300)
    assert status == 0
    assert [each["text"] for each in lines(out)] == ["one", "two", *["more"] * 300]
    assert [each["index"] for each in lines(out)] == list(range(302))
    (tmp_path / "note.txt").write_text("first line\nsecond line\n")
    (tmp_path / "list.txt").write_text("one\ntwo\n")
    status, out, _ = said(where, "embed", "--file", "note.txt", "--lines", "list.txt", cwd=tmp_path)
    assert status == 0
    found = lines(out)
    assert found[0]["file"] == "note.txt"
    assert [each["text"] for each in found[1:]] == ["one", "two"]


def test_vectors_are_printed_in_three_forms(where: Path) -> None:
    """Numbers as JSON, as base64 of float32, or alone; with fewer dimensions, normalised again."""
    (first,) = lines(said(where, "embed", "a fox", "--dimensions", "8")[1])
    assert len(first["embedding"]) == 8
    (second,) = lines(said(where, "embed", "a fox", "--dimensions", "8", "--base64")[1])
    data = b64decode(second["embedding"])
    assert list(struct.unpack("<8f", data)) == pytest.approx(first["embedding"], abs=1e-4)
    _, plain, _ = said(where, "embed", "a fox", "--dimensions=8", "--plain")
    assert [float(x) for x in plain.split()] == pytest.approx(first["embedding"], abs=1e-4)


def test_documents_are_printed_best_first(where: Path) -> None:
    """With their scores, as text or as JSON."""
    documents = ["about foxes", "about the sea", "about lanterns"]
    status, out, errors = said(where, "rerank", "who?", *documents, "--json")
    assert (status, errors) == (0, "")
    found = lines(out)
    assert sorted(each["text"] for each in found) == sorted(documents)
    assert [each["score"] for each in found] == sorted((e["score"] for e in found), reverse=True)
    assert all(documents[each["index"]] == each["text"] for each in found)
    _, out, _ = said(where, "rerank", "who?", "--top-n", "2", stdin="\n".join(documents))
    assert [line.split("  ")[-1] for line in out.splitlines()] == [e["text"] for e in found[:2]]


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "words"),
    [
        (["embed"], "", 1, "There is no text"),
        (["embed", ""], "", 1, "text 1 is empty"),
        (["embed", "a", "--dimensions", "0"], "", 1, "at least 1"),
        (["embed", "a", "--plain", "--base64"], "", 1, "give one of them"),
        (["embed", "a", "--file", "missing.txt"], "", 1, "missing.txt: No such file"),
        (["embed", "a", "--dimensions", "999"], "", 2, "at most 64"),
        (["embed", "a", "--model", "other"], "", 2, "this daemon serves embedder"),
        (["embed"], "short\n" * 300 + "long " * 200, 2, "Line 301 of standard input is too large"),
        (["rerank", "who?"], "", 1, "There is no document"),
        (["rerank", "", "a"], "", 1, "The query is empty"),
        (["rerank", "who?", "a", "b " * 200], "", 2, "Text 2 is too large"),
        (["rerank", "who?", "a", "--top-n", "0"], "", 1, "at least 1"),
    ],
)
def test_what_is_wrong_is_named(
    where: Path, arguments: list[str], stdin: str, status: int, words: str
) -> None:
    """A text by its argument, file or line; with the exit status of other verbs."""
    found, _, errors = said(where, *arguments, stdin=stdin)
    assert (found, words in errors) == (status, True), errors


def test_a_text_that_is_too_long_is_cut_if_told_so(where: Path) -> None:
    """And counts as a whole otherwise."""
    status, out, _ = said(where, "embed", "long " * 200, "--truncate")
    assert status == 0
    assert len(lines(out)) == 1
