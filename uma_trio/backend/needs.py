"""What memory a model takes, and how much context fits into what is free: sums, pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from attrs import frozen

from uma_trio.backend.base import ModelError
from uma_trio.words import mib

#: What our own process allocates for a model beside llama.cpp's buffers, and llama.cpp's threads for theirs: 7 to 14 MiB
#: of resident memory of two models with 152k tokens in their vocabularies.
OURS: Final = 8 << 20
#: What a daemon takes without a model: Python and its libraries.
PROCESS: Final = 150 << 20
#: A context has a whole number of so many cells (llama-context.cpp, GGML_PAD).
_CELLS: Final = 256


@frozen
class Needs:
    """The bytes of the machine's memory that a loaded model takes, with a context of `n_ctx` cells.

    `own` weights are for this process alone: read, or rearranged for the processor. `mapped` ones lie in the page cache,
    once for all processes, and the kernel can drop them. `compute` are the buffers of a computation and its results,
    `work` is what the CPU's backend of ggml has beside them. `other` is the vocabulary and what else llama.cpp keeps.
    `device` is what lies on devices instead.
    """

    n_ctx: int
    own: int
    mapped: int
    kv: int
    compute: int
    other: int = 0
    device: int = 0
    work: int = 0

    @property
    def private(self) -> int:
        """What no other process shares, and what the kernel cannot drop."""
        return self.own + self.kv + self.compute + self.work + self.other + OURS

    @property
    def total(self) -> int:
        """All of it in the machine's memory."""
        return self.private + self.mapped

    def in_words(self) -> str:
        return (
            f"{mib(self.total)}: {mib(self.own + self.mapped)} of weights, {mib(self.kv)} of KV cache for n_ctx "
            f"{self.n_ctx}, {mib(self.compute + self.work)} to compute with, {mib(self.other + OURS)} for its vocabulary and tables"
        )


@frozen
class Question:
    """How a model that writes is going to be loaded, as `LlamaBackend.load` has it.

    `others` are further sizes of the context.
    """

    n_ctx: int
    n_slots: int
    kv_type: str
    flash_attention: str
    gpu_layers: int
    mmap: bool
    others: tuple[int, ...] = ()
    n_cpu_moe: int = 0


@frozen
class Estimate:
    """What a model needs as it would be loaded.

    `curve` are sums at other sizes of the context, in ascending order of `n_ctx`. The model was `trained` for
    so many tokens, 0 if that is not known, and the context is for so many `slots`.
    """

    needs: Needs
    curve: tuple[Needs, ...] = ()
    trained: int = 0
    slots: int = 1

    def largest_context(self, room: int) -> int:
        """Return the most cells for which `room` bytes suffice, of those that were tried; 0 if there are none.

        Never more than the model was trained for: longer texts get nonsense for an answer.
        """
        cells = self._most_cells(room)
        return min(cells, self.trained or cells)

    def _most_cells(self, room: int) -> int:
        """Return the most cells for which `room` bytes suffice, of any use or not.

        Between two sums the need is at most on the line between them: the KV cache grows in proportion, and
        the buffers by the larger of several that do.
        """
        if not self.curve or self.curve[0].total > room:
            return 0
        for below, above in pairwise(self.curve):
            if above.total > room:
                per_cell = (above.total - below.total) / (above.n_ctx - below.n_ctx)
                cells = below.n_ctx + int((room - below.total) / per_cell)
                cells = max(below.n_ctx, cells // _CELLS * _CELLS)
                break
        else:
            cells = self.curve[-1].n_ctx
        return cells

    def refuse_beside(self, room: int) -> None:
        """Refuse to load beside a daemon that serves with the same model, where the memory does not allow both.

        Mapped weights are there once for both. Raises ModelError; its message has the sum, and the way that needs
        no second copy.
        """
        each = self.needs
        need = each.private + PROCESS
        if need > room:
            raise ModelError(
                f"--replace needs {mib(need)} beside the daemon that serves: {mib(each.own)} of weights that are not"
                f" shared, {mib(each.kv)} of KV cache, {mib(each.compute)} to compute with,"
                f" {mib(need - each.own - each.kv - each.compute)} for the process; {mib(room)} are free."
                " It serves on. `uma-trio service restart` loses no request either and needs no second copy;"
                " without a service, stop it with `uma-trio stop` and start this one."
            )

    def refusal_of_devices(self, room: int) -> str:
        """Return why a model is refused that does not fit into the `room` bytes of the GPUs."""
        return (
            f"it needs {mib(self.needs.device)} on the GPU, and {mib(room)} are free there. Unload a model, or have fewer "
            "layers there (gpu_layers), a smaller n_ctx, or a smaller kv_type such as q8_0"
        )

    def refusal(self, room: int) -> str:
        """Return why a model that does not fit is refused: the sum, what is free, and what to do."""
        cells = self._most_cells(room)
        fits = min(cells, self.trained * self.slots or cells)
        smaller = f"set n_ctx to {fits} at most" if fits else "choose a smaller quantisation"
        return (
            f"it needs {self.needs.in_words()}; {mib(room)} are free. Unload a model or close other programs, "
            f"{smaller}, or a smaller kv_type such as q8_0"
        )
