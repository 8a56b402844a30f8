"""What compiles shapes, made from the options; and whether it is made ready at the start.

A daemon whose clients use shapes is likely to see more of them after a restart: a small file beside the cost
tables says so, and the vocabulary is prepared before the first client then. Nobody else pays for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from uma_trio.backend.base import Vocabulary
from uma_trio.config.options import Config
from uma_trio.confined.workers import Unavailable
from uma_trio.observe import log
from uma_trio.policy.costing.store import cache_folder
from uma_trio.text.frontend import FrontEnd

if TYPE_CHECKING:
    from uma_trio.text.confinement import Confinement

_MARK: Final = "shapes-are-used"
_FORGOTTEN_S: Final = 30 * 86_400.0


def confinement(config: Config, events: dict[str, int]) -> Callable[[Vocabulary], Confinement]:
    """Return a function that starts the compiler of shapes when it is needed; it counts in `events`."""

    def make(vocabulary: Vocabulary) -> Confinement:
        from uma_trio.text.confinement import Confinement, ShapeLimits  # few daemons need it

        limits = ShapeLimits(cpu_s=config.shape_cpu_s, memory_bytes=config.shape_memory)
        return Confinement(vocabulary, limits, on_first=_mark, events=events)

    return make


def warm_if_used(front_end: FrontEnd) -> None:
    """Prepare for shapes if they were used lately. Blocks for as long as the first one would."""
    try:
        age = time.time() - (cache_folder() / _MARK).stat().st_mtime
    except OSError:
        return
    if age > _FORGOTTEN_S:
        return
    try:
        front_end.warm()
    except Unavailable as error:
        log.get("daemon").warning("shapes cannot be checked", why=str(error))


def _mark() -> None:
    with suppress(OSError):  # as with cost tables: what cannot be written is no error
        cache_folder().mkdir(parents=True, exist_ok=True)
        (cache_folder() / _MARK).touch()
