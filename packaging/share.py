"""What an installation has besides the programs: the manual page and the shells' completion."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MANUAL = "man/man1/uma-trio.1"
#: Where a shell looks below a prefix's share/.
COMPLETIONS = {
    "bash": "bash-completion/completions/uma-trio",
    "zsh": "zsh/site-functions/_uma-trio",
    "fish": "fish/vendor_completions.d/uma-trio.fish",
}


def add_share(share: Path, program: Path) -> None:
    """Write the manual page and the completions below `share`, with the installed `program`."""
    page = share / MANUAL
    page.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "docs" / "uma-trio.1", page)
    for shell, place in COMPLETIONS.items():
        made = subprocess.run([program, "completion", shell], capture_output=True, check=True)
        target = share / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(made.stdout)
