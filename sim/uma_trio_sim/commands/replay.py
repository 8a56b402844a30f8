"""`uma-trio replay`: plan every tick of a trace again, and compare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from uma_trio.cli.output import OK, complain, print_json
from uma_trio.cli.parser import Parameter
from uma_trio.words import harmless, several

if TYPE_CHECKING:
    from uma_trio.policy.pipeline import Policy
    from uma_trio.policy.portable import Header, TracedTick

DIFFERENT = 1
TROUBLE = 2  # nothing was compared; the same statuses as diff's
_NO_TRACE = "this is not a trace; name a file that `uma-trio serve --trace` wrote"


def replay(
    file: Annotated[Path, Parameter(help="A trace that `uma-trio serve --trace` wrote.")],
    /,
    *,
    policy: Annotated[
        str | None, Parameter(help="Compare with this policy instead of the recorded one.")
    ] = None,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
) -> int:
    """Plan every tick of a trace again and compare the plans.

    Exit status: 0 if all plans are equal, 1 at the first difference, 2 if nothing can be compared.
    """
    from uma_trio.policy.pipeline import PolicyError
    from uma_trio.policy.portable import TraceError
    from uma_trio_sim.ablation import ablated

    try:
        other = None if policy is None else ablated(policy)
    except PolicyError as error:
        complain(f"--policy {policy}: {error}.")
        return TROUBLE
    try:
        with file.open("rb") as lines:
            return _replay(file, _Ticks(lines), policy, other, json)
    except OSError as error:
        complain(f"{file}: {error.strerror}; name a file that `uma-trio serve --trace` wrote.")
    except TraceError as error:
        complain(f"{file}: {harmless(str(error))}.")
    except PolicyError as error:
        complain(f"{file}: {harmless(str(error))}; name the one to compare with by --policy.")
    return TROUBLE


def _replay(
    file: Path, ticks: _Ticks, name: str | None, policy: Policy | None, as_json: bool
) -> int:
    import attrs

    from uma_trio_sim.ablation import ablated
    from uma_trio_sim.replay import replay as replay_ticks

    header = ticks.header
    name = name or header.policy
    found = replay_ticks(policy or ablated(name), ticks, work_only=name != header.policy)
    if as_json:
        print_json({"policy": name, **attrs.asdict(found), "complete": ticks.are_complete()})
        return OK if found.first is None else DIFFERENT
    made = f"{header.model}, policy {header.policy}, uma-trio {header.version}"
    print(harmless(f"{file}: {made}"))
    if found.missing:
        print(f"It lacks {several(found.missing, 'tick')}.")
    if not ticks.are_complete():
        print("Its end is missing: the daemon still runs, or did not stop in order.")
    if found.first is None:
        print(f"All {found.ticks} plans are reproduced.")
        return OK
    first = found.first
    print(f"Tick {first.tick}, number {found.ticks} of the trace, is planned differently:")
    print(harmless(f"  {first.where}: {first.recorded} was recorded, {first.replayed} comes out."))
    return DIFFERENT


class _Ticks:
    """The ticks of a trace, read as they are wanted; its header is read at once."""

    def __init__(self, lines: BinaryIO) -> None:
        self._lines = enumerate(lines, start=1)
        self._last = b""
        self.header: Header = self._header()

    def __iter__(self) -> Iterator[TracedTick]:
        from uma_trio.policy.portable import TracedTick

        for number, text in self._lines:
            self._last = text
            if not text.endswith(b"\n"):
                return  # the daemon was killed while it wrote this line
            line = _line(number, text)
            if isinstance(line, TracedTick):
                yield self.header.tuned(line)

    def are_complete(self) -> bool:
        """Tell whether the trace was closed in order. Reads it to its end, for the last line only."""
        from uma_trio.policy.portable import Footer, TraceError, decode

        for _, text in self._lines:
            self._last = text
        try:
            return isinstance(decode(self._last), Footer)
        except TraceError:
            return False

    def _header(self) -> Header:
        from uma_trio.policy.portable import TraceError

        _, text = next(self._lines, (1, b""))
        if not text.startswith(b'{"header":'):
            raise TraceError(_NO_TRACE)
        header: Header = _line(1, text)
        return header


def _line(number: int, text: bytes) -> Any:
    from uma_trio.policy.portable import TraceError, decode

    try:
        return decode(text)
    except TraceError as error:
        message = f"line {number}: {error}"
        raise TraceError(message) from None
