"""Print the flags that give `uma-trio demo` a model: none where one is bundled.

Without a bundled model a small synthetic one is made, once, outside the checkout. Its text is
noise; everything else about it is real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from uma_trio.backend.base import ModelError
from uma_trio.parts import bundled_model

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "uma-trio"


def main() -> int:
    """Print nothing, or ``--model PATH``."""
    try:
        bundled_model()
    except ModelError:
        target = CACHE / "models" / "tiny.gguf"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "models.synthetic", "--preset", "tiny"]
            subprocess.run([*command, "--out", str(target)], check=True, stdout=sys.stderr)
        print(f"--model={target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
