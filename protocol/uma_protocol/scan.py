"""What a document holds, found with `bytes` methods before a parser builds any of it."""

from __future__ import annotations

from itertools import accumulate

MAX_DEPTH = 32
MAX_NODES = 4096
MAX_BARE_BYTES = 32_768
"""Of a document outside its strings, without white space: 64 KiB of long numbers take 4 ms to parse."""
MAX_ESCAPES = 131_072
"""Backslashes in a document: a frame of so many takes 4 ms to scan and to parse."""

_BRACKETS_ONLY = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SPACE = b" \t\r\n"


class Scan:
    """What can be said about a document from its punctuation, without parsing it.

    For valid JSON the counts are exact. For anything else they bound the work of the parser, which
    then finds the error.
    """

    __slots__ = ("bare", "depth", "escapes", "members", "nodes")

    def __init__(
        self, *, nodes: int, depth: int, members: int, bare: int = 0, escapes: int = 0
    ) -> None:
        self.bare = bare
        self.escapes = escapes
        self.nodes = nodes
        self.depth = depth
        self.members = members

    def problem(self) -> str | None:
        """Which bound is exceeded, in words."""
        if self.escapes > MAX_ESCAPES:
            return f"the document has more than {MAX_ESCAPES} backslashes: send less in one frame"
        if self.bare > MAX_BARE_BYTES:
            return (
                f"the document has more than {MAX_BARE_BYTES} bytes outside of strings: send fewer "
                "or shorter numbers"
            )
        if self.nodes > MAX_NODES:
            return f"the document has more than {MAX_NODES} values: send less in one frame"
        if self.depth > MAX_DEPTH:
            return f"the document is nested deeper than {MAX_DEPTH} levels: flatten it"
        return None


_TOO_MANY = Scan(nodes=MAX_NODES + 1, depth=0, members=0)


def scan(payload: bytes) -> Scan:
    """Count values, object members and depth, in time bounded by a few passes over the bytes."""
    escapes = payload.count(b"\\")
    if escapes > MAX_ESCAPES:
        return Scan(nodes=0, depth=0, members=0, escapes=escapes)
    if escapes:
        # What is left of a run of backslashes after pairs are gone escapes the next character, so
        # after these two passes every quote is one that opens or closes a string.
        if rb"\\" in payload:
            payload = payload.replace(rb"\\", b"")
        if rb"\"" in payload:
            payload = payload.replace(rb"\"", b"")
    # A string is a value or names one: more strings than this cannot be few values. The check
    # comes before the split, whose cost grows with their number.
    if payload.count(b'"') > 4 * MAX_NODES:
        return _TOO_MANY
    outside = b'"'.join(payload.split(b'"')[::2]).translate(None, _SPACE)
    commas = outside.count(b",")
    openings = outside.count(b"[") + outside.count(b"{")
    if commas >= MAX_NODES or openings > MAX_NODES:
        return _TOO_MANY
    if len(outside) - outside.count(b'"') > MAX_BARE_BYTES:
        return Scan(nodes=0, depth=0, members=0, bare=len(outside))
    # Each comma separates one more value, and a container that is not empty has a first one.
    nodes = 1 + commas + openings - outside.count(b"[]") - outside.count(b"{}")
    depth = openings
    if depth > MAX_DEPTH:
        brackets = outside.translate(_BRACKETS_ONLY, _NOT_BRACKETS)
        depth = max(accumulate(1 if byte == 0x5B else -1 for byte in brackets))
    return Scan(nodes=nodes, depth=depth, members=outside.count(b":"))
