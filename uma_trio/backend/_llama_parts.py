"""Calls of ``llama_encode`` and ``llama_decode`` that are computed in parts.

``cb_eval`` (ggml-backend.cpp, ggml_backend_sched_compute_splits) is asked before each node of a graph whether the
computation shall stop behind it, and is called when it has. So a call runs on a thread of its own, which waits in
that callback between two parts. :meth:`GraphParts.advance` lets it go on, and waits until it stops. Only one of the two
threads runs at a time, and the result is the same to the bit, also if another context is computed in between.

Where to stop is chosen before the computation, from the predicted time of each node.

llama.cpp asks for every node, by way of Python, and the callback is a parameter of a context. Of the contexts that
write only those have one whose smallest decode takes long: there it costs little, and smaller batches would not make a
decode short.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend.base import ModelError

#: Nodes of an encoder are computed together until they take so long: a stop costs 10 to 20 µs.
GRAIN_S: Final = 5e-4
#: And nodes of a decode.
DECODE_GRAIN_S: Final = 5e-3
LONG_S: Final = 0.025
"""A decode is computed in parts if one of a single token takes so long: about what a reading pace of 40 ms leaves beside
a small model. A callback takes 1 to 2 µs, and there are 600 to 1,200 of them."""
_PROFILED: Final = 8  # tokens of the decode that nodes are timed in
_LEARNING: Final = 0.2  # the weight of the latest part
_NEVER: Final = 1 << 30

Seconds = NDArray[np.float64]
Call = Callable[[], int]


class GraphParts:
    """The thread that computes calls of one context. Make it first: `callback` is a parameter of the context."""

    def __init__(self, name: str) -> None:
        self.callback = llama.ggml_backend_sched_eval_callback(self._asked)
        #: How much slower than predicted the machine was in the latest parts.
        self.slower = 1.0
        #: Whether a call was begun that has not ended.
        self.is_running = False
        self._name = name
        self._flag = ctypes.create_string_buffer(2)  # any text ends a computation
        self._timed: list[float] | None = None
        self._ends: list[int] = []  # the last node of each part, and of none behind these
        self._part_s: list[float] = []
        self._node = self._part = 0
        self._until = self._began = 0.0
        self._is_wanted: Callable[[], bool] = bool
        self._call: Call | None = None
        self._status: int | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def time_nodes(self, call: Call) -> Seconds:
        """Return the seconds of each node of a call. Raises :class:`ModelError` if it fails."""
        self._timed = []
        try:
            self._start(call, [], [])
            self._resume(math.inf)
            timed = np.array(self._timed)
        finally:
            self._timed = None
        if self._status or not len(timed):
            raise ModelError("llama.cpp cannot compute this model.")
        return timed

    def begin(self, call: Call, node_s: Seconds, grain_s: float) -> None:
        """Begin a call whose nodes should take `node_s`, in parts of `grain_s` or of one node."""
        within = np.cumsum(node_s)
        ends, part_s, last_s = [], [], 0.0
        while last_s < (float(within[-1]) if len(within) else 0.0):
            end = min(int(np.searchsorted(within, last_s + grain_s)), len(within) - 1)
            ends.append(end)
            part_s.append(float(within[end]) - last_s)
            last_s = float(within[end])
        self._start(call, ends, part_s)

    def next_s(self) -> float:
        """Return the predicted seconds of the next part; 0 if unknown."""
        return self._part_s[self._part] if self._part < len(self._part_s) else 0.0

    def advance(self, most_s: float, is_wanted: Callable[[], bool] = bool) -> int | None:
        """Compute for at most `most_s`, by prediction, and one part at least; return the status at the end.

        It stops earlier if something else `is_wanted`, which is asked between two parts on the other thread.
        """
        self._is_wanted = is_wanted
        self._resume(most_s)
        return None if self.is_running else self._status

    def drop(self, context: int) -> None:
        if self.is_running:
            lib.set_abort_callback(context, lib.strlen, ctypes.addressof(self._flag))
            self._flag[0] = b"x"
            self._is_wanted = bool  # some of ggml's backends do not ask whether to go on
            self._resume(math.inf)
            self._flag[0] = b"\0"
            lib.set_abort_callback(context, None, None)

    def close(self, context: int) -> None:
        """Abort the call and end the thread. The context must exist until this returns."""
        self.drop(context)
        self._call = None
        if self._thread is not None:
            self._go.release()
            self._thread.join()
            self._thread = None

    def _start(self, call: Call, ends: list[int], part_s: list[float]) -> None:
        self._call, self._ends, self._part_s = call, ends, part_s
        self._node, self._part, self._status = -1, 0, None
        self.is_running = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def _resume(self, most_s: float) -> None:
        self._began = perf_counter()
        self._until = self._began + most_s
        self._go.release()
        self._stopped.acquire()

    # --- on the thread that computes ---

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._call is None:
                return
            self._status = self._call()
            self.is_running = False
            self._stopped.release()

    def _asked(self, _node: int, before: bool, _data: object) -> bool:
        """Say whether to stop behind this node; or wait there, once it is computed.

        False from behind a node would end the computation and call it a success.
        """
        if before:
            if not self.is_running:
                return False  # a call that is computed as a whole
            self._node += 1
            if self._timed is not None:
                return True
            return self._part < len(self._ends) and self._node >= self._ends[self._part]
        now = perf_counter()
        if self._timed is not None:
            self._timed.append(now - self._began)
            self._began = perf_counter()
            return True
        took_s, predicted_s = now - self._began, self._part_s[self._part]
        if predicted_s:
            change = took_s / predicted_s - 1
            self.slower = min(max(self.slower * (1 + _LEARNING * change / 10), 0.1), 100.0)
        self._part += 1
        if now + self.next_s() > self._until or self._is_wanted():
            self._stopped.release()
            self._go.acquire()
        self._began = perf_counter()
        return True


class EncoderParts:
    """The batches of an encoder, in parts. Make it first: `callback` is a parameter of the context.

    How long a node takes is measured once for one token, and corrected by how slow the machine was lately.
    """

    def __init__(self) -> None:
        self._graph = GraphParts("encoder")
        self.callback = self._graph.callback
        self._node_s: Seconds = np.zeros(0)  # of one token
        self._context = 0

    def attach(self, context: int, batch: Any, *, causal: bool) -> None:
        """Compute the batch of this context from now on. `batch` is a struct that its owner fills."""
        compute, self._context = lib.decode if causal else lib.encode, context
        self._call: Call = lambda: compute(context, batch)

    def calibrate(self, n_tokens: int) -> None:
        """Time each node of a batch of so many tokens, which is there. Raises :class:`ModelError`."""
        self._node_s = self._graph.time_nodes(self._call) / n_tokens

    def rows_within(self, part_s: float) -> int:
        """Return how many tokens a batch may have for its longest node to take at most `part_s`; 1 at least."""
        longest = float(self._node_s.max(initial=0.0)) * self._graph.slower
        return max(1, int(min(part_s / longest, _NEVER))) if longest else _NEVER

    def begin(self, n_tokens: int) -> None:
        """Begin a batch of so many tokens."""
        self._graph.begin(self._call, self._node_s * n_tokens * self._graph.slower, GRAIN_S)

    def next_s(self) -> float:
        """Return the predicted seconds of the next part; 0 if unknown."""
        return self._graph.next_s()

    def advance(self, most_s: float) -> int | None:
        """Compute for at most `most_s`, by prediction, and one part at least; return the status at the end."""
        return self._graph.advance(most_s)

    def drop(self) -> None:
        self._graph.drop(self._context)

    def close(self) -> None:
        """Give up the batch and end the thread. The context must exist until this returns."""
        self._graph.close(self._context)


class DecodeParts:
    """The decodes of a context that takes long for one token, in parts.

    `share` is the part of a decode's time that each node takes.
    """

    def __init__(self, share: Seconds | None = None) -> None:
        self.graph = GraphParts("decode")
        self.share: Seconds = np.ones(1) if share is None else share

    @property
    def longest(self) -> float:
        """The part of a decode's time that its longest node takes."""
        return float(self.share.max())

    def profile(self, call: Call) -> None:
        """Time each node of a decode. Raises :class:`ModelError` if it fails."""
        for _ in range(2):  # the first touches memory for the first time
            timed = self.graph.time_nodes(call)
        self.share = timed / timed.sum()

    def begin(self, call: Call, predicted_s: float) -> None:
        """Begin a decode that should take so long."""
        self.graph.begin(call, self.share * predicted_s, DECODE_GRAIN_S)


def with_parts(make: Callable[..., int], *, wanted: bool) -> tuple[int, DecodeParts | None]:
    """Return a context, and what computes its decodes in parts if that is `wanted` and they take long.

    `make` makes a context with the `callback` that it is given. On a GPU each stop would wait for all that was
    launched: none is to be wanted there. Raises :class:`ModelError`.
    """
    context = make()
    if not wanted or _decode_s(context, 1) < LONG_S:
        return context, None
    llama.llama_free(context)
    parts = DecodeParts()
    context = make(callback=parts.graph.callback)
    try:
        parts.profile(lambda: _decode(context, _PROFILED))
    except BaseException:
        parts.graph.close(context)
        llama.llama_free(context)
        raise
    parts.graph.close(
        context
    )  # a thread that this one started, which may be polite, would be polite forever
    return context, parts


def _decode_s(context: int, n_tokens: int) -> float:
    """Return the seconds of a decode, or 0 if one failed.

    The first touches memory, and of up to three more the quickest counts: other models may be computed meanwhile.
    """
    took: list[float] = []
    while len(took) < 4 and not (len(took) > 1 and _is_clear(min(took[1:]))):
        began = perf_counter()
        if _decode(context, n_tokens):
            return 0.0
        took.append(perf_counter() - began)
    return min(took[1:])


def _is_clear(seconds: float) -> bool:
    return not LONG_S <= seconds < 4 * LONG_S


def _decode(context: int, n_tokens: int) -> int:
    """Compute tokens in a context that is empty, and is again then; return the status."""
    tokens = (llama.llama_token * n_tokens)(*([0] * n_tokens))
    status = int(llama.llama_decode(context, llama.llama_batch_get_one(tokens, n_tokens)))
    lib.seq_rm(int(llama.llama_get_memory(context)), -1, -1, -1)
    return status
