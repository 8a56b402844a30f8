"""LoRA adapters with random weights for models of :mod:`models.synthetic`, for tests and measurements.

python -m models.adapters --preset tiny --rank 4 --seed 1 --out one.gguf
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np

from models.synthetic import PRESETS, Shape

_TARGETS = ("attn_q", "attn_v", "ffn_down")


def write_adapter(
    out: Path,
    shape: Shape = PRESETS["tiny"],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    strength: float = 1.0,
) -> Path:
    """Write an adapter for models of this shape to `out`, and return `out`.

    Args:
        out: The file to write; its folder must exist.
        shape: That of the model. One without attention and experts has nothing to adapt.
        rank: Of each pair of matrices.
        alpha: What is added is multiplied by this over the rank.
        seed: The same seed gives the same file.
        strength: How large what is added is beside the model's own weights.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, shape.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    head = shape.head_width
    sizes = {
        "attn_q": (shape.heads * head, shape.width),
        "attn_v": (shape.kv_heads * head, shape.width),
        "ffn_down": (shape.width, shape.ffn),
    }
    for layer in range(shape.layers):
        for name in _TARGETS:
            rows, columns = sizes[name]
            for part, dims in (("a", (rank, columns)), ("b", (rows, rank))):
                spread = strength * columns**-0.5 if part == "a" else rank**-0.5
                values = rng.standard_normal(dims, dtype=np.float32) * np.float32(spread)
                writer.add_tensor(f"blk.{layer}.{name}.weight.lora_{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def main(argv: list[str] | None = None) -> int:
    """Write the adapter that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m models.adapters", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="the GGUF to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    write_adapter(given.out, PRESETS[given.preset], rank=given.rank, seed=given.seed)
    sys.stdout.write(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
