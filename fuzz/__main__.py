"""Run the fuzz targets for as long as you like: `python -m fuzz --seconds 600`."""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import sys
import time
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings

from .targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = pathlib.Path(__file__).parent / "corpus"
EXAMPLES_PER_ROUND = 500


def run_round(name: str) -> tuple[bytes, Exception] | None:
    """Try one target on fresh inputs; the smallest input that breaks it and how, or None."""
    target = TARGETS[name]
    broken: list[tuple[bytes, Exception]] = []

    def attempt(data: bytes) -> None:
        try:
            target.check(data)
        except Exception as exc:
            # Shrinking calls again and again; the last failure is that of the smallest input.
            broken.append((data, exc))
            raise

    search: Callable[[], None] = settings(
        max_examples=EXAMPLES_PER_ROUND,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(given(target.inputs)(attempt))
    try:
        search()
    except Exception:
        if not broken:
            raise
        return broken[-1]
    return None


def keep(name: str, data: bytes) -> pathlib.Path:
    """Put an input into the corpus of a target, so that the tests replay it from now on."""
    path = CORPUS / name / f"found-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def main() -> int:
    """Run until the time is over or something breaks; exit 1 in that case."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--target", choices=sorted(TARGETS), help="one target only")
    options = parser.parse_args()
    names = [options.target] if options.target else list(TARGETS)
    end = time.monotonic() + options.seconds
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        for name in names:
            found = run_round(name)
            if found is not None:
                data, exc = found
                print(f"{name}: broken by {data!r}\n  {type(exc).__name__}: {exc}")
                print(f"kept as {keep(name, data)}; the tests replay it from now on")
                return 1
        rounds += 1
    print(f"{', '.join(names)}: {rounds * EXAMPLES_PER_ROUND} inputs each, nothing broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
