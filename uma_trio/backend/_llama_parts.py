"""A call of ``llama_encode`` or ``llama_decode`` that is computed in parts.

``cb_eval`` (ggml-backend.cpp, ggml_backend_sched_compute_splits) is asked before each node of a graph whether the
computation shall stop behind it, and is called when it has. So the call runs on a thread of its own, which waits in
that callback between two parts. :meth:`Parts.advance` lets it go on, and waits until it stops. Only one of the two
threads runs at a time, and the result is the same to the bit.

Where to stop is chosen before the computation. It needs the time of each node: measured once for one token, and
corrected by how much slower the machine was in the latest batches.
"""

from __future__ import annotations

import ctypes
import math
import threading
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama

#: Nodes are computed together until they take so long: a stop costs 10 to 20 µs.
GRAIN_S: Final = 5e-4
_LEARNING: Final = 0.2  # the weight of the latest part
_NEVER: Final = 1 << 30


class Parts:
    """The thread that computes batches of one context. Make it first: `callback` is a parameter of the context."""

    def __init__(self) -> None:
        self.callback = llama.ggml_backend_sched_eval_callback(self._asked)
        self._flag = ctypes.create_string_buffer(2)  # any text ends a computation
        self._node_s: NDArray[np.float64] = np.zeros(0)  # of one token
        self._slower = 1.0
        self._timed: list[float] | None = None
        self._ends: list[int] = []  # the last node of each part, and of none behind these
        self._part_s: list[float] = []
        self._node = self._part = 0
        self._until = self._began = 0.0
        self._status: int | None = None
        self._running = self._closed = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def attach(self, context: int, batch: Any, *, causal: bool) -> None:
        """Compute the batch of this context from now on. `batch` is a struct that its owner fills."""
        self._context, self._batch = context, batch
        self._compute = lib.decode if causal else lib.encode
        lib.set_abort_callback(context, lib.strlen, ctypes.addressof(self._flag))
        self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)
        self._thread.start()

    def calibrate(self, n_tokens: int) -> int | None:
        """Time each node of a batch of so many tokens, which is there; return its status."""
        self._timed = []
        try:
            self._start([], [])
            self._resume(math.inf)
            self._node_s = np.array(self._timed) / n_tokens
        finally:
            self._timed = None
        return self._status

    def rows_within(self, part_s: float) -> int:
        """Return how many tokens a batch may have for its longest node to take at most `part_s`; 1 at least."""
        longest = float(self._node_s.max(initial=0.0)) * self._slower
        return max(1, int(min(part_s / longest, _NEVER))) if longest else _NEVER

    def begin(self, n_tokens: int) -> None:
        """Begin a batch of so many tokens."""
        within = np.cumsum(self._node_s * n_tokens * self._slower)
        ends, part_s, last_s = [], [], 0.0
        while last_s < (float(within[-1]) if len(within) else 0.0):
            end = min(int(np.searchsorted(within, last_s + GRAIN_S)), len(within) - 1)
            ends.append(end)
            part_s.append(float(within[end]) - last_s)
            last_s = float(within[end])
        self._start(ends, part_s)

    def next_s(self) -> float:
        """Return the predicted seconds of the next part; 0 if unknown."""
        return self._part_s[self._part] if self._part < len(self._part_s) else 0.0

    def advance(self, most_s: float) -> int | None:
        """Compute for at most `most_s`, by prediction, and one part at least; return the status at the end."""
        self._resume(most_s)
        return None if self._running else self._status

    def drop(self) -> None:
        """Give up the batch, if there is one."""
        if self._running:
            self._flag[0] = b"x"
            self._resume(math.inf)
            self._flag[0] = b"\0"

    def close(self) -> None:
        """Give up the batch and end the thread. The context must be there until this returns."""
        self.drop()
        self._closed = True
        if self._thread is not None:
            self._go.release()
            self._thread.join()

    def _start(self, ends: list[int], part_s: list[float]) -> None:
        self._ends, self._part_s = ends, part_s
        self._node, self._part, self._status = -1, 0, None
        self._running = True

    def _resume(self, most_s: float) -> None:
        self._began = perf_counter()
        self._until = self._began + most_s
        self._go.release()
        self._stopped.acquire()

    # --- on the thread that computes ---

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._closed:
                return
            self._status = self._compute(self._context, self._batch)
            self._running = False
            self._stopped.release()

    def _asked(self, _node: int, before: bool, _data: object) -> bool:
        """Say whether to stop behind this node; or wait there, once it is computed.

        False from behind a node would end the computation and call it a success.
        """
        if before:
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
            self._slower = min(max(self._slower * (1 + _LEARNING * change / 10), 0.1), 100.0)
        self._part += 1
        if now + self.next_s() > self._until:
            self._stopped.release()
            self._go.acquire()
        self._began = perf_counter()
        return True
