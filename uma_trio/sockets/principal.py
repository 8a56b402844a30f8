"""Whom a request is for: the one value from which caches, fairness and rights are derived."""

from __future__ import annotations

from attrs import evolve, frozen


@frozen(kw_only=True)
class Principal:
    """A user of the daemon, as the kernel attests it or as an API key proves it.

    Nothing that a client claims about itself is part of it.

    - `connection` is unique for the life of the process, `host` the address of the other end (""
      for a Unix socket).
    - `uid` and `pid` of the process at the other end are attested by the kernel, None if unknown.
    - `has_token`: it has presented the token of the daemon's TCP port; then its user need not be known.
    - `key` is the place of the API key among those of the daemon, never its text.
    - An operator may see and change the requests of all users.
    """

    connection: int
    host: str = ""
    uid: int | None = None
    pid: int | None = None
    key: int | None = None
    has_token: bool = False
    is_forwarded: bool = False
    is_operator: bool = False

    @property
    def shares_as(self) -> str:
        """Whose cached prefixes, drafts and requests it may use: the key's, the user's, or none but its own."""
        if self.key is not None:
            return f"key {self.key}"
        if self.uid is not None:
            return f"uid {self.uid}"
        if self.is_forwarded:
            return f"address {self.host}"
        return "token" if self.has_token else f"connection {self.connection}"

    @property
    def counts_as(self) -> str:
        """What fairness counts as one. Connections without an attested user count by address."""
        if self.key is None and self.uid is None and not self.has_token:
            return f"address {self.host}"
        return self.shares_as

    @property
    def process(self) -> str:
        """The narrowest name of the client: its process, or its connection if that is unknown."""
        return f"connection {self.connection}" if self.pid is None else f"process {self.pid}"

    def with_token(self) -> Principal:
        """Return the principal of a client that has shown the token: the attested user's, else the token's.

        The token makes no operator: its holders, such as a container, are clients.
        """
        return evolve(self, has_token=True)

    def holding(self, key: int, *, is_operator: bool) -> Principal:
        """Return the principal of a request that gave an API key: the key's, on any connection.

        A key replaces the rights of the user: behind a proxy all clients have the proxy's uid.
        """
        return evolve(self, key=key, is_operator=is_operator)

    def may_change(self, other: Principal) -> bool:
        """Whether requests of `other` may be seen, moved and ended: its own, or for operators all."""
        return self.is_operator or self.shares_as == other.shares_as

    def owns(self, namespace: str) -> bool:
        """Whether cached prefixes of this namespace are its own."""
        return f"{namespace}/".startswith(f"{self.shares_as}/")
