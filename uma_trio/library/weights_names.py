"""What the names of GGUF files say: the quantisation, the parts of a split model, what is no model."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Final

_QUANT: Final = re.compile(
    r"(?i)(?:^|[-._])((?:UD-)?(?:I?Q[1-9](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32))(?=[-._]|$)"
)
_PART: Final = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})$")
# Modules that draft tokens for a model; the same words elsewhere in a name say that the model has one in it.
_DRAFTERS: Final = ("mtp-", "eagle3-", "dflash-", "dspark-")
# In this order a quantisation is taken where none is named; llama.cpp's tools do the same.
PREFERRED: Final = ("Q4_K_M", "Q8_0")
_BITS: Final = re.compile(r"\d+")


def quant_of(name: str) -> str:
    """Return the quantisation that a file's name ends with, in capitals; "" if it names none."""
    found = _QUANT.findall(stem_of(name))
    return found[-1].upper() if found else ""


def stem_of(name: str) -> str:
    """Return the name of a model's file without folder, suffix, and number of the part."""
    stem = PurePosixPath(name).name.removesuffix(".gguf")
    part = _PART.match(stem)
    return part["stem"] if part else stem


def part_of(name: str) -> tuple[int, int]:
    """Return which part of how many a file is; (1, 1) if the model is not split."""
    part = _PART.match(PurePosixPath(name).name.removesuffix(".gguf"))
    return (int(part["no"]), int(part["count"])) if part else (1, 1)


def is_model(name: str) -> bool:
    """Whether a file is a model or a part of one, by its name."""
    last = PurePosixPath(name).name.lower()
    beside = "mmproj" in last or last.startswith(_DRAFTERS) or _is_imatrix(last)
    return last.endswith(".gguf") and not beside


def _is_imatrix(last: str) -> bool:
    """Whether a file is what was measured to quantise; a model that was quantised with that has a quantisation."""
    stem = stem_of(last)
    data = stem.startswith("imatrix") or stem.endswith(".imatrix") or not quant_of(last)
    return "imatrix" in stem and data


def is_projector(name: str) -> bool:
    """Whether a file is the part of a model that reads images, by its name."""
    last = PurePosixPath(name).name.lower()
    return last.endswith(".gguf") and "mmproj" in last


def bits_of(quant: str) -> int:
    """Return about how many bits a weight takes in a quantisation; 16 if its name does not say."""
    found = _BITS.search(quant)
    return int(found[0]) if found else 16
