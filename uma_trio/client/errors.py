"""Errors of the client: the daemon refused a request, or it cannot be reached."""

from __future__ import annotations

from uma_protocol import CODES, Code, Eos, Error


class ServerError(Exception):
    """The daemon refused a request or could not finish it.

    `retryable`: the same request may succeed later, after `retry_after_ms`.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool = False,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms

    @classmethod
    def of(cls, event: Error | Eos) -> ServerError:
        """Return the error that an `error` event, or an `eos` with reason `error`, reports."""
        if isinstance(event, Error):
            return cls(
                event.code,
                event.message,
                retryable=event.retryable,
                retry_after_ms=event.retry_after_ms,
            )
        code = event.code or ""
        # A newer daemon may have codes that this library lacks.
        retryable = code in Code.__members__ and CODES[Code(code)].retryable
        return cls(code, event.message or "the request failed", retryable=retryable)


class ConnectionFailed(Exception):
    """The daemon cannot be reached, or the connection broke. The message names the next step.

    `holder` is the process that is starting or stopping at that socket, where there is one: nothing
    was sent, and the daemon can be reached as soon as it serves. Known on Linux only.
    """

    def __init__(self, message: str, *, holder: int | None = None) -> None:
        super().__init__(message)
        self.holder = holder


class ConnectionLost(ConnectionFailed):
    """An established connection broke: parts of an answer may have been shown."""
