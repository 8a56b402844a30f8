"""The error of a request that is not accepted."""

from __future__ import annotations

from uma_protocol.errors import Code


class Refusal(Exception):
    """The request was not accepted and never reached the engine.

    Attributes:
        code: the error code.
        message: one sentence with the problem, the bound, and what to do.
        field: the field of the :class:`Ask` that is at fault, if it is one field.
        retry_after_s: when a retry is useful, if it is.
        prompt_tokens: the length of the prompt, if prompt and answer do not fit into the context.
        context: the limit for prompt and answer together, in the same case.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        prompt_tokens: int | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.prompt_tokens = prompt_tokens
        self.context = context
