"""What went wrong with a request, for a person at a terminal: flags instead of fields, the code last."""

from __future__ import annotations

import re

from uma_protocol import Generate, ProtocolError
from uma_trio.client import ServerError

#: Fields of a request have a flag of the same name. Those that are also plain words count only where a message begins
#: with them.
_NAMES = (*Generate.__struct_fields__, "seconds", "ticks")
_UNMISTAKABLE = [name for name in _NAMES if "_" in name or name == "temperature"]
_FIELD = re.compile(rf"(?<![-\w])({'|'.join(_UNMISTAKABLE)})\b")
_AT_START = re.compile(rf"({'|'.join(_NAMES)})(\[\d+\])?(?=(\.\w+)* (must|is|has|cannot)\b)")


def sentence(error: BaseException) -> str:
    """Return what an error says, as one sentence; its code is behind it, in parentheses."""
    if not isinstance(error, ServerError | ProtocolError):
        return _capital(str(error))
    begin = _AT_START.match(error.message)
    text = error.message
    if begin:
        text = _flag(begin[1]) + text[begin.end() :]
    text = _FIELD.sub(lambda found: _flag(found[1]), text)
    return f"{_capital(text).rstrip('.')}. ({error.code})"


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _capital(text: str) -> str:
    """Return `text` with a capital letter, unless it begins with a name: a path, a flag, a command."""
    first = text.split(" ", 1)[0]
    return text[:1].upper() + text[1:] if first.isalpha() else text
