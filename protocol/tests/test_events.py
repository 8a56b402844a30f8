"""The values that cross the wire."""

import msgspec
import pytest

from uma_protocol import Generate, Request, Token
from uma_protocol.fields import FIELDS
from uma_protocol.inputs import REQUESTS as KINDS

REQUESTS = list(KINDS)


@pytest.mark.parametrize("value", [Token("a", "b", 1), Generate("a", prompt="b")])
def test_values_are_frozen(value):
    """What crosses a border is not changed afterwards."""
    with pytest.raises(AttributeError, match="immutable"):
        value.id = "c"


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_class_has_the_fields_that_are_declared_for_it(kind):
    """Names, order and requiredness of a request agree with the declaration of its fields."""
    declared = FIELDS[kind.__struct_config__.tag]
    fields = msgspec.structs.fields(kind)
    assert [field.name for field in fields] == [field.name for field in declared]
    assert [field.required for field in fields] == [field.required for field in declared]


def test_every_type_of_request_has_a_class():
    """No type is declared that cannot be sent."""
    assert {kind.__struct_config__.tag for kind in REQUESTS} == set(FIELDS)
    assert set(Request.__args__) == set(REQUESTS)


def test_a_request_defaults_to_text_for_a_person():
    """What a client leaves out means: interactive, the model's way to choose a token, streamed."""
    request = Generate("a", prompt="b")
    assert (request.priority, request.temperature, request.stream) == ("interactive", None, True)
    assert (request.top_p, request.top_k, request.min_p, request.stop) == (None, None, None, ())
