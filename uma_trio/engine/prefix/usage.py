"""What the prefix cache gave each namespace, and what a larger budget would have given it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from attrs import define, field

#: Namespaces whose use is counted, the latest; a salt makes one, so that there could be any number.
MOST_NAMESPACES: Final = 1024


@define(eq=False)
class Use:
    """Tokens of prompts that came, that were there, and that twice the budget would have had besides."""

    asked: int = 0
    there: int = 0
    missed: int = 0


@define(eq=False)
class Usage:
    """How each namespace used the cache since the start, or since it was cleared."""

    _by_namespace: OrderedDict[str, Use] = field(factory=OrderedDict)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Of whom something is counted."""
        return tuple(self._by_namespace)

    def of(self, namespace: str) -> Use:
        """Return what is counted of a namespace, to be added to."""
        use = self._by_namespace.setdefault(namespace, Use())
        self._by_namespace.move_to_end(namespace)
        if len(self._by_namespace) > MOST_NAMESPACES:
            self._by_namespace.popitem(last=False)
        return use

    def clear(self, namespace: str) -> None:
        """Forget a namespace."""
        self._by_namespace.pop(namespace, None)
