"""Files of models are tried in a process of their own, which says what memory they take. For helper threads."""

from __future__ import annotations

from collections.abc import Hashable

from uma_trio.backend.base import Adapter, ModelError, ModelFacts
from uma_trio.backend.needs import Estimate, Needs
from uma_trio.keeper.entry import Entry
from uma_trio.wiring import estimate, try_adapters, variant_estimate


def tried(entry: Entry) -> Estimate:
    """Try the files of a model, and return what it takes. Raises :class:`ModelError`.

    An adapter is tried once with its model, whatever scales requests ask for: a trial reads the model's file.
    """
    if entry.base is None:
        return estimate(entry.config)
    marks = {each.name: _mark(each) for each in entry.adapters}
    untried = [each for each in entry.adapters if marks[each.name] not in entry.base.tried]
    if untried or entry.base.further is None:
        try_adapters(entry.config, untried)
        entry.base.further = variant_estimate(entry.config)
        entry.base.tried.update(marks.values())
    if (files := tuple(marks.values())) != entry.files:
        entry.files, entry.prefixes = files, None  # they are those of other adapters
    return entry.base.further


def held_by(entry: Entry, model: ModelFacts) -> Estimate:
    """Return what memory a loaded model has; of a variant only its context.

    Where its file was removed since, that is what is known of it without: weights and KV cache.
    """
    try:
        return estimate(entry.config) if entry.base is None else variant_estimate(entry.config)
    except ModelError:
        n_ctx = entry.n_ctx
        weights = model.weight_bytes if entry.base is None else 0
        needs = Needs(n_ctx, int(weights), 0, int(model.cell_bytes * n_ctx), 0)
        return Estimate(needs, needs)


def _mark(adapter: Adapter) -> Hashable:
    """Return what an adapter's file is known by: another one of the same name is tried again."""
    try:
        found = adapter.path.stat()
    except OSError:
        return adapter.path
    return adapter.path, found.st_mtime_ns, found.st_size
