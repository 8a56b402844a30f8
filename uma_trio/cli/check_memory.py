"""Whether models fit into memory, by what llama.cpp itself says that it would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from uma_trio.cli.checks import Finding
from uma_trio.config.options import Config
from uma_trio.saying import size

if TYPE_CHECKING:
    from uma_trio.backend.needs import Estimate


def check_memory(configs: Sequence[Config]) -> list[Finding]:
    """See what each model takes and with which context it fits; and whether those loaded at start fit together."""
    from uma_trio.backend.base import ModelError
    from uma_trio.backend.kv_memory import available_memory
    from uma_trio.wiring import estimate

    room = available_memory()
    found, together = [], 0
    for config in configs:
        name = config.alias[0] if config.alias else str(config.model)
        about = "memory" if len(configs) == 1 else f"memory of {name}"
        try:
            needed = estimate(config)
        except ModelError as error:
            found.append(Finding(about, "blocks", str(error)))
            continue
        if config is configs[0] or config.load == "start":
            together += needed.least.private
        found.append(_judged(about, needed, room))
    if len(configs) > 1 and room is not None and together > room:
        what = f"the models that are loaded at start need {size(together)}, only {size(room)} available"
        fix = "give some of them `load: on-demand`, a smaller n_ctx or a smaller kv_type"
        found.append(Finding("memory of all", "blocks", what, fix))
    return found


def _judged(about: str, needed: Estimate, room: int | None) -> Finding:
    need, least = needed.needs, needed.least
    what = (
        f"{size(need.total)} needed: {size(need.own + need.mapped)} of weights, {size(need.kv)} of KV cache, "
        f"{size(need.compute)} to compute with"
    )
    if need.device:
        what += f"; {size(need.device)} on the GPU"
    if room is None:
        return Finding(about, "ok", what)
    most = needed.largest_context(room)
    if need.total <= room:
        return Finding(about, "ok", f"{what}; {size(room)} available, enough for --n-ctx {most}")
    if least.total <= room:
        fit = f"{what}; {size(least.total)} with flash attention, which is used: {size(room)} available"
        return Finding(about, "ok", fit)
    fits = f"--n-ctx {most}" if most else "a smaller quantisation"
    fix = f"use {fits}, --kv-type q8_0 or a smaller model, or close other programs"
    what += f"; only {size(room)} available"
    return Finding(about, "blocks" if least.private > room else "slow", what, fix)
