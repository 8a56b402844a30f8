"""Listing, clearing and pinning prefixes, only in the user's own namespaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from uma_trio.engine.kv.cache import PrefixCache
from uma_trio.engine.messages import Prefix
from uma_trio.observe.records import NamespaceReport, PrefixReport

Mine = Callable[[str], bool]


def handle(prefix: PrefixCache, message: Prefix) -> PrefixReport:
    if message.clear:
        return clear(prefix, message.mine)
    if message.session is not None:
        return pin(prefix, message.mine, message.session, message.pin_s)
    return report(prefix, message.mine)


def report(prefix: PrefixCache, mine: Mine, dropped: int = 0) -> PrefixReport:
    """Return the content of each namespace that is `mine`; `dropped` tokens were just cleared."""
    store = prefix.store
    leaves: Counter[str] = Counter()
    for leaf in prefix.leaves:
        leaves[leaf.namespace] += len(leaf.tokens)
    known = (*store.trie.namespaces, *leaves, *prefix.usage.namespaces)
    names = {name for name in known if mine(name)}
    found = []
    for name in sorted(names):
        pages = tuple(store.trie.pages(name))
        sessions = prefix.saving.sessions(name)
        use = prefix.usage.of(name)
        found.append(
            NamespaceReport(
                name,
                pages=len(pages),
                tokens=sum(len(page.tokens) for page in pages),
                n_bytes=sum(page.n_bytes for page in pages),
                leaf_tokens=leaves[name],
                sessions=tuple(sorted(sessions)),
                asked=use.asked,
                there=use.there,
                missed=use.missed,
            )
        )
    return PrefixReport(store.budget, store.n_bytes, tuple(found), dropped)


def clear(prefix: PrefixCache, mine: Mine) -> PrefixReport:
    """Drop all leaves and pages that are `mine`, except pages that are being restored."""
    return report(prefix, mine, prefix.clear(mine))


def pin(prefix: PrefixCache, mine: Mine, session: str, seconds: float) -> PrefixReport:
    """Pin the latest turn of a session for this time; 0 removes the pin."""
    for name in prefix.store.trie.namespaces:
        if mine(name):
            prefix.saving.pin(name, session, seconds)
    return report(prefix, mine)
