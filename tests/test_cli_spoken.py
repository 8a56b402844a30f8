"""Errors are said in words of the command line."""

from __future__ import annotations

import pytest

from uma_protocol import Code, LocalProtocolError
from uma_trio.cli.attempt import sentence
from uma_trio.client import ConnectionFailed, ServerError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            LocalProtocolError(Code.E_PROTO_003, "top_p must be a number from 0 to 1, but it is 3"),
            "--top-p must be a number from 0 to 1, but it is 3. (E_PROTO_003)",
        ),
        (
            LocalProtocolError(Code.E_PROTO_003, "stop[0] must be a string of 1 to 256 bytes"),
            "--stop must be a string of 1 to 256 bytes. (E_PROTO_003)",
        ),
        (
            ServerError("E_LIMIT_004", "a prompt of 9 and max_tokens 99 exceed the context of 50"),
            "A prompt of 9 and --max-tokens 99 exceed the context of 50. (E_LIMIT_004)",
        ),
        (
            ServerError("E_PROTO_003", "grammar is not usable: Rule 'x' not found"),
            "--grammar is not usable: Rule 'x' not found. (E_PROTO_003)",
        ),
        (
            ServerError("E_LIMIT_001", "the prompt is 5000 bytes long; raise --max-prompt-bytes."),
            "The prompt is 5000 bytes long; raise --max-prompt-bytes. (E_LIMIT_001)",
        ),
        (
            ServerError("E_LIMIT_003", "the session has ended; --max-tokens 9 stays"),
            "The session has ended; --max-tokens 9 stays. (E_LIMIT_003)",
        ),
        (ConnectionFailed("cannot reach the daemon"), "Cannot reach the daemon"),
        (ConnectionFailed("/x/y is served by user 0"), "/x/y is served by user 0"),
    ],
)
def test_an_error_is_a_sentence_with_flags_and_its_code_at_the_end(
    error: Exception, said: str
) -> None:
    """Who typed flags looks for flags; who reports the error quotes the code."""
    assert sentence(error) == said
