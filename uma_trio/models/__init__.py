"""The model that comes with the package: the storyteller.

`models/storyteller/README.md` in the repository tells how it was made.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def bundled_model() -> Path:
    """The storyteller: what is served when no model is named."""
    path = Path(str(resources.files(__name__) / "storyteller.gguf"))
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: this installation came without its model")
    return path
