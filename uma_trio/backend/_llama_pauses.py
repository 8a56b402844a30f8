"""A call of ``llama_decode`` that pauses between nodes of its graph, on the thread that made it.

``cb_eval`` (ggml-backend.cpp, ggml_backend_sched_compute_splits) is asked before each node whether the computation shall
stop behind it, and is called when it has. What is done there changes no bit of the result, as long as it leaves the
context alone: another context may be computed.

llama.cpp asks for every node, by way of Python, and the callback is a parameter of a context. So only contexts whose
smallest decode takes long have one: there it costs little, and smaller batches would not make a decode short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend.base import ModelError, Overlap

LONG_S: Final = 0.025
"""A context pauses if a decode of one token takes so long: about what a reading pace of 40 ms leaves beside a
small model. A callback takes 1 to 2 µs, and there are 600 to 1,200 of them (docs/MODELS.md has what was measured)."""
GRAIN_S: Final = 0.005
"""NodePauses are so far apart, by prediction. Each costs about 20 µs and what is done in it."""
_PROFILED: Final = 8  # tokens of the decode that nodes are timed in


class NodePauses:
    """The callback of one context, and where its decodes pause."""

    def __init__(self) -> None:
        self.callback = llama.ggml_backend_sched_eval_callback(self._asked)
        self._share: NDArray[np.float64] = np.ones(1)  # of a decode's time, by node
        self._timed: list[float] | None = None
        self._hook: Overlap | None = None
        self._ends: Iterator[int] = iter(())
        self._node = self._end = -1
        self._raised: BaseException | None = None

    @property
    def longest(self) -> float:
        """The part of a decode's time that its longest node takes."""
        return float(self._share.max())

    def like(self) -> NodePauses:
        """Return the callback of another context with the same weights."""
        found = NodePauses()
        found._share = self._share
        return found

    def profile(self, decode: Callable[[], int]) -> None:
        """Time each node of a decode. Raises :class:`ModelError` if it fails."""
        for _ in range(2):  # the first time memory is touched for the first time
            self._timed = []
            self._last = time.perf_counter()
            failed = decode()
            timed, self._timed = self._timed, None
            if failed or not timed:
                raise ModelError("llama.cpp cannot compute this model.")
        self._share = np.array(timed) / sum(timed)

    def arm(self, hook: Overlap, predicted_s: float) -> None:
        """Have `hook` called in pauses of the next decode, which should take so long."""
        parts = np.floor(np.cumsum(self._share) * predicted_s / GRAIN_S)
        # Behind the last node the decode is over.
        self._ends = iter(np.flatnonzero(np.diff(parts, prepend=0.0)[:-1]).tolist())
        self._node, self._end = -1, next(self._ends, -1)
        self._hook = hook

    def disarm(self) -> None:
        """Note that the decode is over; what its hook raised comes out here."""
        self._hook = None
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _asked(self, _node: int, before: bool, _data: object) -> bool:
        """Say whether to stop behind this node; or do what is to be done there.

        False from behind a node would end the computation and call it a success.
        """
        if before:
            if self._hook is not None:
                self._node += 1
                return self._node == self._end
            return self._timed is not None
        if self._timed is not None:
            now = time.perf_counter()
            self._timed.append(now - self._last)
            self._last = time.perf_counter()
            return True
        self._end = next(self._ends, -1)
        if self._raised is None and self._hook is not None:
            try:
                self._hook()
            except BaseException as error:  # nothing may unwind through C
                self._raised = error
        return True


def with_pauses(make: Callable[..., int], *, wanted: bool) -> tuple[int, NodePauses | None]:
    """Return a context, and its pauses if they are `wanted` and its decodes take long.

    `make` makes a context with the `callback` that it is given. On a GPU each pause would wait for all that was
    launched: none is to be wanted there. Raises :class:`ModelError`.
    """
    context = make()
    if not wanted or _decode_s(context, 1) < LONG_S:
        return context, None
    llama.llama_free(context)
    pauses = NodePauses()
    context = make(callback=pauses.callback)
    try:
        pauses.profile(lambda: _decode(context, _PROFILED))
    except BaseException:
        llama.llama_free(context)
        raise
    return context, pauses


def _decode_s(context: int, n_tokens: int) -> float:
    """Return the seconds of a decode, or 0 if one failed.

    The first touches memory, and of up to three more the quickest counts: other models may be computed beside them.
    """
    took: list[float] = []
    while len(took) < 4 and not (len(took) > 1 and _is_clear(min(took[1:]))):
        began = time.perf_counter()
        if _decode(context, n_tokens):
            return 0.0
        took.append(time.perf_counter() - began)
    return min(took[1:])


def _is_clear(seconds: float) -> bool:
    """Whether what is measured once more would not tell otherwise whether a decode is long."""
    return not LONG_S <= seconds < 4 * LONG_S


def _decode(context: int, n_tokens: int) -> int:
    """Compute tokens in a context that is empty, and is again then; return the status."""
    tokens = (llama.llama_token * n_tokens)(*([0] * n_tokens))
    status = int(llama.llama_decode(context, llama.llama_batch_get_one(tokens, n_tokens)))
    lib.seq_rm(int(llama.llama_get_memory(context)), -1, -1, -1)
    return status
