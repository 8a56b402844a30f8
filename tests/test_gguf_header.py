"""The look at a model file before llama.cpp sees it: every broken file is one sentence."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from uma_trio.backend.base import ModelError
from uma_trio.backend.gguf_header import Tensor, read_header


def string(text: str) -> bytes:
    """Return a GGUF string."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


def model(
    keys: Sequence[tuple[str, int, bytes]] = (),
    *,
    version: int = 3,
    kind: int = 0,
    dims: Sequence[int] = (8, 4),
    offset: int = 0,
    data: int = 128,
) -> bytes:
    """Return a small GGUF file with one tensor, of 8 x 4 floats unless told otherwise."""
    head = b"GGUF" + struct.pack("<IQQ", version, 1, 1 + len(keys))
    for key, type_number, value in (("general.architecture", 8, string("llama")), *keys):
        head += string(key) + struct.pack("<I", type_number) + value
    head += string("weight") + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    head += struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % 32 + data)


def strings(*texts: str) -> bytes:
    """Return a GGUF array of strings."""
    return struct.pack("<IQ", 8, len(texts)) + b"".join(map(string, texts))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    """Return a function that writes a file and tells its path."""

    def do(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return do


def refusal(path: Path) -> str:
    """Return the sentence with which `path` is refused, and check that it is one."""
    with pytest.raises(ModelError) as caught:
        read_header(path)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def test_a_good_file_tells_its_keys(write: Callable[[bytes], Path]) -> None:
    """Scalars and short arrays of numbers are kept, long arrays are stepped over."""
    keys = [
        ("llama.block_count", 4, struct.pack("<I", 2)),
        ("llama.attention.head_count_kv", 9, struct.pack("<IQ2I", 4, 2, 3, 5)),
        ("tokenizer.ggml.tokens", 9, strings("a", "b", "", "")),
        ("general.name", 8, string("Näme")),
    ]
    header = read_header(write(model(keys)))
    assert header.architecture == "llama"
    assert header.tensors == (Tensor("weight", 128),)
    assert header.number("block_count") == 2
    assert header.numbers("attention.head_count_kv", 2) == (3, 5)
    assert header.metadata["general.name"] == "Näme"
    assert "tokenizer.ggml.tokens" not in header.metadata


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With what to do."""
    assert "none.gguf; check the path" in refusal(tmp_path / "none.gguf")


def test_a_directory_is_named(tmp_path: Path) -> None:
    """A directory is not mistaken for a broken file."""
    assert "directory" in refusal(tmp_path)


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    """Opening a FIFO would block for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert "regular file" in refusal(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_names_the_fix(write: Callable[[bytes], Path]) -> None:
    """Missing permission is said as such."""
    path = write(model())
    path.chmod(0)
    assert "chmod" in refusal(path)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"<!DOCTYPE html>", "web page"),
        (b"PK\x03\x04" + bytes(100), "archive"),
        (struct.pack("<Q", 90) + b'{"a":1}', "safetensors"),
        (b"hello world, this is no model", "not a GGUF"),
        (b"GGU", "truncated"),
        (b"GGUF", "truncated"),
        (model(version=1), "version 1"),
        (model(version=4), "version 4"),
        (model(version=3 << 24), "big-endian"),
        (model()[:-1], "truncated"),
        (model(data=0), "truncated"),
        (model(offset=32), "truncated"),
        (model(offset=7), "not aligned"),
        (model(kind=4), "removed"),
        (model(kind=2, dims=(8, 4)), "shape"),
        (model(dims=(0, 4)), "shape"),
        (model(dims=(1 << 40, 1 << 40)), "shape"),
        (model(dims=(1, 1, 1, 1, 1)), "dimensions"),
        (model([("general.alignment", 4, struct.pack("<I", 24))]), "alignment"),
        (model([("general.alignment", 4, struct.pack("<I", 0))]), "alignment"),
        (model([("x", 13, b"")]), "type 13"),
        (model([("x", 9, struct.pack("<IQ", 9, 1))]), "items of type 9"),
        (model([("x", 8, struct.pack("<Q", 1 << 63))]), "truncated"),
        (model([("x", 9, struct.pack("<IQ", 8, 1 << 60))]), "strings"),
        (model([("x", 9, struct.pack("<IQ", 10, 1 << 61))]), "truncated"),
        (model([("tokenizer.ggml.tokens", 9, strings("a", "b", "a"))]), "twice"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 50, 1), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 50), "claims"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_file_is_refused_with_its_reason(
    write: Callable[[bytes], Path], data: bytes, word: str
) -> None:
    """Each kind of damage is named; lengths are never believed."""
    assert word in refusal(write(data))


def test_every_truncation_is_noticed(write: Callable[[bytes], Path]) -> None:
    """Cut anywhere, the file is refused."""
    keys = [("tokenizer.ggml.tokens", 9, strings("a", "b")), ("general.name", 8, string("n"))]
    data = model(keys)
    for length in range(len(data)):
        refusal(write(data[:length]))


def test_any_flipped_bytes_are_read_or_refused(write: Callable[[bytes], Path]) -> None:
    """Damage is a `ModelError` or goes unnoticed; nothing else comes out, and soon."""
    keys = [
        ("tokenizer.ggml.tokens", 9, strings(*map(str, range(20)))),
        ("llama.block_count", 4, struct.pack("<I", 2)),
        ("x", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
    ]
    good = model(keys)
    rng = random.Random(1)
    for _ in range(500):
        data = bytearray(good)
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(good) - 128)] = rng.randrange(256)
        try:
            read_header(write(bytes(data)))
        except ModelError:
            continue


def test_all_parts_of_a_split_model_are_checked(tmp_path: Path) -> None:
    """The first part leads to the others; a missing one is named."""
    keys = [("split.count", 2, struct.pack("<H", 2))]
    first = tmp_path / "m-00001-of-00002.gguf"
    second = tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(model(keys))
    with pytest.raises(ModelError, match="00002-of-00002"):
        read_header(first)
    second.write_bytes(model(keys))
    header = read_header(first)
    assert (len(header.tensors), header.size_bytes) == (2, 2 * first.stat().st_size)
    assert header.parts == (first, second)
    with pytest.raises(ModelError, match="name the first part"):
        read_header(second)
    odd = tmp_path / "m.gguf"
    odd.write_bytes(model(keys))
    assert "00001-of-00002" in refusal(odd)
