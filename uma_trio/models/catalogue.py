"""The configured models by their names, and those that requests make up of a model and its adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio
from attrs import evolve

from uma_trio.backend.base import Adapter
from uma_trio.config.models import ON_DEMAND
from uma_trio.config.options import Config
from uma_trio.models.entry import Entry
from uma_trio.service.choice import called
from uma_trio.service.variants import by_list, by_name, name_of
from uma_trio.words import Gives

AGAIN_S = 30.0
"""Who failed to load is not tried again for so long."""


class Catalogue:
    """The `entries`, which it owns and to which it adds variants. The first one answers requests that name none."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries: Sequence[Entry] = entries
        self._entries = entries  # the same list
        for entry in tuple(entries):
            for adapter in entry.known:
                self.variant(entry, (adapter,)).passing = False

    @property
    def bases(self) -> Sequence[Entry]:
        """The models without adapters."""
        return [each for each in self.entries if each.base is None]

    def find(self, name: str, gives: Gives | None = None) -> Entry | None:
        """Return the model of this name as :func:`called` chooses it, which may be a variant.

        Raises:
            Refusal: it has no such adapter.
        """
        return called(name, self.bases, gives, self._variant_called)

    def _variant_called(self, name: str, bases: Sequence[Entry]) -> Entry | None:
        """Return a model of these with the adapters that are behind the last colon of a name."""
        base = next((one for one in bases if one.known), None)
        adapters = name.rpartition(":")[2]
        if base is None or adapters == "latest":
            return None
        return self.variant(base, by_name(adapters, base.known))

    def with_adapters(self, entry: Entry, asked: Sequence[Mapping[str, object]]) -> str:
        """Return the name of a model with the adapters of llama-server's list in place of its own.

        Raises:
            Refusal: the list is no such list, or names what is not there.
        """
        base = entry.base or entry
        return self.variant(base, by_list(asked, base.known)).names[0]

    def variant(self, base: Entry, adapters: tuple[Adapter, ...]) -> Entry:
        """Return a model with these adapters."""
        if not adapters:
            return base
        name = f"{base.names[0]}:{name_of(adapters, base.known)}"
        for entry in self.entries:
            if entry.base is base and entry.names[0] == name:
                return entry
        self._entries[:] = [each for each in self._entries if not _is_forgotten(each)]
        own = _variant_config(base.config, name)
        made = Entry(own, base=base, adapters=adapters, passing=True)
        self._entries.append(made)
        return made


def _variant_config(config: Config, name: str) -> Config:
    """Return the settings of a variant: those of the model, with a name, and a trace, of its own."""
    trace = config.trace
    if trace is not None:
        part = "".join(each if each.isalnum() else "-" for each in name)
        trace = trace.with_name(f"{trace.stem}-{part}{trace.suffix}")
    return evolve(
        config,
        alias=(name,),
        load=ON_DEMAND,
        lora=(),
        is_variant=True,
        model_pin=False,
        trace=trace,
    )


def _is_forgotten(entry: Entry) -> bool:
    """Whether nobody needs what a request made up."""
    failed = entry.state == "failed" and trio.current_time() - entry.failed_at >= AGAIN_S
    return entry.passing and not entry.waiting and (entry.state == "unloaded" or failed)
