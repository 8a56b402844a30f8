"""Model files with one thing changed in their heads. Lengths stay, so that all else is as it was."""

from __future__ import annotations

import struct
from pathlib import Path

from uma_trio.models import bundled_model


def with_float(path: Path, key: str, value: float) -> Path:
    """Change a float in a file; `key` is the end of its name."""
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + struct.calcsize("<I")
    data[at : at + 4] = struct.pack("<f", value)
    path.write_bytes(data)
    return path


def called(path: Path, name: bytes) -> Path:
    """Write the bundled model with this `general.name`, cut or filled up with z to the length of its own."""
    data = bytearray(bundled_model().read_bytes())
    at = data.index(b"general.name") + len("general.name") + struct.calcsize("<I")
    (length,) = struct.unpack_from("<Q", data, at)
    at += 8
    data[at : at + length] = name[:length].ljust(length, b"z")
    path.write_bytes(data)
    return path


def asserting(path: Path) -> Path:
    """Write the bundled model so that llama.cpp loads it, and ends the process when it computes."""
    path.write_bytes(bundled_model().read_bytes())
    return with_float(path, "layer_norm_rms_epsilon", -1e-5)


def refused(path: Path) -> Path:
    """Write the bundled model so that our reader takes it, and llama.cpp refuses it."""
    data = bytearray(bundled_model().read_bytes())
    at = data.index(b".block_count") + len(".block_count") + 4
    data[at : at + 4] = struct.pack("<I", 77)
    path.write_bytes(data)
    return path
