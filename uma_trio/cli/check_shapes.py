"""What `doctor` says of the processes that compile shapes."""

from __future__ import annotations

import time
from typing import Final

from uma_trio.cli.checks import Finding

_FIX: Final = (
    "schemas, grammars and tools are refused until it can; look for a limit on processes (ulimit -u) "
    "or memory (ulimit -v), or a sandbox that forbids to start programs"
)


def check_shapes() -> list[Finding]:
    """Start a process as the first schema would, and have it compile one."""
    from uma_trio.backend.fake import FakeVocabulary
    from uma_trio.text.confinement import Confinement
    from uma_trio.text.shape import Shape, Unconstrainable

    confinement = Confinement(FakeVocabulary())
    began = time.monotonic()
    try:
        confinement.check(Shape("schema", '{"type": "object"}'))
    except Unconstrainable as error:
        return [Finding("structured output", "slow", f"a schema {error}", _FIX)]
    finally:
        confinement.close()
    took = time.monotonic() - began
    return [
        Finding("structured output", "ok", f"schemas are compiled apart: {took:.1f} s to start")
    ]
