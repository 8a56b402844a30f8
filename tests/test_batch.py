"""From sequences to the arrays of one decode."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_kit import Sink
from uma_trio.backend.base import Batch
from uma_trio.engine.batch import BatchBuilder
from uma_trio.engine.chunk import Chunk
from uma_trio.engine.messages import SamplingParams, Submit
from uma_trio.engine.sampling import Sampler
from uma_trio.engine.sequences import Sequence
from uma_trio.text.stream import TokenText

SCRATCH = 99


def sequence(slot: int, known: int, computed: int) -> Sequence:
    """Return a sequence in `slot` that knows so many tokens, of which so many are computed."""
    prompt = np.arange(1000 * slot, 1000 * slot + known, dtype=np.int32)
    made = Sequence(
        Submit(slot, prompt, 4, SamplingParams(), (), "interactive", 0, 9, Sink(), 0.0),
        Sampler(SamplingParams(), ()),
        TokenText([]),
    )
    made.slot = slot
    made.rewind(computed)
    return made


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=8
    ),
    ballast=st.integers(0, 3),
    extra_rows=st.integers(0, 3),
)
def test_every_token_is_written_where_it_belongs(
    sizes: list[tuple[int, int, int]], ballast: int, extra_rows: int
) -> None:
    """One token or many, in any order: its id, position and slot; a row of logits only at an end."""
    batch = Batch(100)
    batch.want[:] = 1  # what an earlier tick left there
    sequences = [
        sequence(slot, computed + n + more, computed)
        for slot, (computed, n, more) in enumerate(sizes)
    ]
    shares = [(s, n) for s, (_, n, _) in zip(sequences, sizes, strict=True)]
    chunks = [
        Chunk(s.handle, s.computed, n, n_rows=int(s.computed + n == s.known)) for s, n in shares
    ]
    extra_rows = min(extra_rows, sizes[-1][1])
    owners = {s.handle: s for s in sequences}
    BatchBuilder(64, SCRATCH).fill(batch, chunks, owners, extra_rows=extra_rows, ballast=ballast)
    expected = [
        (1000 * s.slot + place, place, s.slot, place == s.known - 1)
        for s, n in shares
        for place in range(s.computed, s.computed + n)
    ]
    for place in range(1, extra_rows + 1):
        expected[-place] = (*expected[-place][:3], True)
    expected += [(expected[0][0], place, SCRATCH, True) for place in range(ballast)]
    n = len(expected)
    arrays = (batch.token, batch.pos, batch.slot, batch.want)
    written = list(zip(*(array[:n].tolist() for array in arrays), strict=True))
    assert written == expected
