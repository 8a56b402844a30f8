"""Whatever JSON stands for a conversation: it is read, or refused with the path at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.api.anthropic import messages as messages_input
from uma_trio.api.responses import messages as responses_input
from uma_trio.http.errors import Fault

# Words that the two APIs know, so that more than the first look at a value is tried.
WORDS = st.sampled_from(
    [
        *("type", "role", "content", "text", "input", "output", "name", "id", "call_id", "tools"),
        *("user", "assistant", "system", "developer", "message", "input_text", "output_text"),
        *("function", "function_call", "function_call_output", "reasoning", "summary", "arguments"),
        *("custom_tool_call", "namespace", "parameters", "description", "mode", "allowed_tools"),
        *("tool_use", "tool_result", "tool_use_id", "thinking", "document", "source", "data"),
        *("input_schema", "custom", "tool", "auto", "any", "none", "encrypted_content", "uma1:x"),
    ]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=24,
)
Reader = Callable[[Any, Callable[[str], None]], object]
READERS: dict[str, Reader] = {
    "items": lambda value, aside: responses_input.messages_of(None, value, aside),
    "functions": responses_input.tools_of,
    "choice of functions": lambda value, _: responses_input.choice_of(value, parallel=True),
    "messages": lambda value, aside: messages_input.messages_of(None, value, aside),
    "system": lambda value, aside: messages_input.messages_of(
        value, [{"role": "user", "content": "x"}], aside
    ),
    "tools": messages_input.tools_of,
    "choice of tools": lambda value, _: messages_input.choice_of(value),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@given(ANY | st.lists(ANY, max_size=4))
def test_any_json_is_read_or_refused(reader: Reader, value: Any) -> None:
    """Nothing else is raised, and what is set aside can be named in a header."""
    aside: list[str] = []
    faults: list[Fault] = []
    try:
        reader(value, aside.append)
    except Fault as fault:
        faults.append(fault)
    assert all(fault.status == 400 and fault.param for fault in faults)
    assert all(name.isascii() and name.isprintable() for name in aside)
