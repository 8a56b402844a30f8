"""The values that cross the wire."""

import pytest

from uma_protocol import Generate, Request, Token
from uma_protocol.inputs import REQUESTS as KINDS
from uma_protocol.requests import BY_TYPE

REQUESTS = list(KINDS)


@pytest.mark.parametrize("value", [Token("a", "b", 1), Generate("a", prompt="b")])
def test_values_are_frozen(value):
    """What crosses a border is not changed afterwards."""
    with pytest.raises(AttributeError, match="immutable"):
        value.id = "c"


def test_every_type_of_request_has_a_class():
    """No type is declared that cannot be sent."""
    assert {kind.__struct_config__.tag for kind in REQUESTS} == set(BY_TYPE)
    assert set(Request.__args__) == set(REQUESTS)


def test_a_request_defaults_to_text_for_a_person():
    """What a client leaves out means: interactive, the model's way to choose a token, streamed."""
    request = Generate("a", prompt="b")
    assert (request.priority, request.temperature, request.stream) == ("interactive", None, True)
    assert (request.top_p, request.top_k, request.min_p, request.stop) == (None, None, None, ())
