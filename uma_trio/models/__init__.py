"""The models that come with the package: the storyteller and its draft.

`models/storyteller/README.md` in the repository tells how they were made.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def _bundled(name: str) -> Path:
    path = Path(str(files(__name__) / name))
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: this installation came without its models")
    return path


def bundled_model() -> Path:
    """The storyteller: what is served when no model is named."""
    return _bundled("storyteller.gguf")


def bundled_draft() -> Path:
    """Its small sibling with the same tokenizer, for speculative decoding."""
    return _bundled("storyteller-draft.gguf")
