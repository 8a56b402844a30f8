"""An encoder that has its weights in memory only while it is used.

Its vocabulary, and what is known of it, are there all the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from uma_trio.backend.base import FloatArray, IntArray, Vocabulary
from uma_trio.backend.encoder import EncodeFailed, EncoderInfo, EncoderModel


class LazyEncoder:
    """See :class:`uma_trio.backend.encoder.EncoderModel`. `make` loads the model; it raises ModelError.

    :meth:`load` and :meth:`unload` may be called on any thread. A model is not unloaded during a step.
    """

    def __init__(
        self, info: EncoderInfo, vocabulary: Vocabulary, make: Callable[[], EncoderModel]
    ) -> None:
        self.info, self.vocabulary = info, vocabulary
        self._make = make
        self._model: EncoderModel | None = None
        self._in_step = False
        self._lock = threading.Lock()  # of the model against being unloaded
        self._one = threading.Lock()  # so that it is loaded once

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._model is not None

    def load(self) -> None:
        """Load the weights, unless they are there. Raises :class:`uma_trio.backend.base.ModelError`."""
        with self._one:
            if self._model is None:
                self._model = self._make()

    def unload(self) -> bool:
        """Free the weights; False if there are none, or a step is under way."""
        with self._lock:
            if self._model is None or self._in_step:
                return False
            model, self._model = self._model, None
        model.close()
        return True

    def rows_within(self, part_s: float) -> int:
        """Return how many tokens a step may have for its longest part to take at most `part_s`."""
        with self._lock:
            return 1 if self._model is None else self._model.rows_within(part_s)

    def begin(self, inputs: Sequence[IntArray], users: Sequence[str] = ()) -> None:
        """Begin a step. Raises :class:`EncodeFailed` if the model was unloaded."""
        with self._lock:
            if self._model is None:
                raise EncodeFailed("the encoder was unloaded")
            self._model.begin(inputs, users)
            self._in_step = True

    def next_s(self) -> float:
        """Return the predicted seconds of the next part."""
        return self._model.next_s() if self._model is not None else 0.0

    def advance(self, most_s: float) -> FloatArray | None:
        """Compute parts of the step for at most `most_s`; return the vectors at the end."""
        if self._model is None:
            raise EncodeFailed("the encoder was unloaded")
        found: FloatArray | None = None
        ended = True
        try:
            found = self._model.advance(most_s)
            ended = found is not None
        finally:
            self._in_step = not ended
        return found

    def drop(self) -> None:
        """Give up the step, if there is one."""
        if self._model is not None and self._in_step:
            self._model.drop()
        self._in_step = False

    def close(self) -> None:
        """Free everything."""
        self._in_step = False
        self.unload()
