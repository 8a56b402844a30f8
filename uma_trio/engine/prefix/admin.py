"""What a user may see of the prefix cache and do to it: only what is in the user's own namespaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from uma_trio.engine.messages import Prefix
from uma_trio.engine.prefix.cache import PrefixCache
from uma_trio.engine.records import NamespaceReport, PrefixReport

Mine = Callable[[str], bool]


def handle(prefix: PrefixCache, message: Prefix) -> PrefixReport:
    """Do what a message asks for, and return what there is then."""
    if message.clear:
        return clear(prefix, message.mine)
    if message.session is not None:
        return pin(prefix, message.mine, message.session, message.pin_s)
    return report(prefix, message.mine)


def report(prefix: PrefixCache, mine: Mine, dropped: int = 0) -> PrefixReport:
    """Return what there is in each namespace that is `mine`; `dropped` tokens have just gone."""
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
    """Drop all leaves and pages that are `mine`, but for pages that a request is given just now."""
    return report(prefix, mine, prefix.clear(mine))


def pin(prefix: PrefixCache, mine: Mine, session: str, seconds: float) -> PrefixReport:
    """Keep the latest turn of a session before all else for so long; 0 ends that."""
    for name in prefix.store.trie.namespaces:
        if mine(name):
            prefix.saving.pin(name, session, seconds)
    return report(prefix, mine)
