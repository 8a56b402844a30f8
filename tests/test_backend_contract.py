"""One suite for both backends, so that the fake cannot drift away from llama.cpp.

The fake has exact arithmetic; llama.cpp may round differently at another batch width, so
there the likeliest token must agree unless two are nearly equal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backend_kit import N_BATCH, N_CTX, N_SLOTS, NEAR, assert_same, decode, feed, prompt, text

from uma_trio.backend.base import (
    Backend,
    DecodeStatus,
    FloatArray,
    Interrupt,
)
from uma_trio_sim.fake import FakeBackend


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model of a few hundred kilobytes."""
    pytest.importorskip("gguf")
    from models.synthetic import write_model

    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


REAL = [
    pytest.param(kind, marks=pytest.mark.real)
    for kind in ("llama", "llama as on a GPU", "llama in streams")
]


@pytest.fixture(params=["fake", *REAL])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Give a backend with 512 cells, 4 slots and batches of 64, of each kind."""
    if request.param == "fake":
        made: Backend = FakeBackend(n_ctx=N_CTX, n_slots=N_SLOTS, n_batch=N_BATCH)
    else:
        from uma_trio.backend.llama import LlamaBackend

        path = request.getfixturevalue("tiny_model")
        made = LlamaBackend.load(
            path,
            n_ctx=N_CTX * (N_SLOTS if request.param == "llama in streams" else 1),
            n_slots=N_SLOTS,
            n_batch=N_BATCH,
            threads=1,
            holds_extent=request.param == "llama as on a GPU",
            flash_attention="on" if request.param == "llama in streams" else "auto",
            kv_layout="streams" if request.param == "llama in streams" else "unified",
        )
    yield made
    made.close()


def test_limits_are_what_was_asked_for(backend: Backend) -> None:
    """The sizes are read back from what was made."""
    limits = backend.limits
    assert (limits.n_slots, limits.n_batch) == (N_SLOTS, N_BATCH)
    assert limits.n_ctx == limits.n_streams * N_CTX
    assert 0 < limits.n_ctx_seq <= N_CTX
    assert backend.batch.capacity >= N_BATCH
    assert backend.description


def test_a_prompt_gives_one_row_of_the_vocabularys_width(backend: Backend) -> None:
    """The row for the wanted token is there, finite, and as wide as the vocabulary."""
    assert decode(backend, prompt(0, text(1, 10))) == DecodeStatus.OK
    row = backend.logits(1)
    assert row.shape == (1, backend.model.n_vocab)
    assert row.dtype == np.float32
    assert np.isfinite(row).all()
    assert backend.kv_length(0) == 10


@pytest.mark.parametrize("n_tokens", [0, -1, N_BATCH + 1, 10**6])
def test_a_batch_of_no_or_too_many_tokens_is_invalid(backend: Backend, n_tokens: int) -> None:
    """Neither an empty batch nor one beyond the capacity is computed, or ends the process."""
    assert backend.decode(n_tokens) == DecodeStatus.INVALID
    assert [backend.kv_length(slot) for slot in range(N_SLOTS)] == [0] * N_SLOTS


@pytest.mark.parametrize("slot", [-1, N_SLOTS, 255, 256, 10**6])
def test_a_slot_out_of_range_is_invalid(backend: Backend, slot: int) -> None:
    """A slot that does not exist makes the batch invalid, and the others get nothing."""
    assert decode(backend, [(0, 0, 97, 1), (slot, 0, 97, 1)]) == DecodeStatus.INVALID
    assert backend.kv_length(0) == 0


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_out_of_range_is_invalid(backend: Backend, token: int) -> None:
    """A token that is not in the vocabulary makes the batch invalid."""
    assert decode(backend, [(0, 0, token, 1)]) == DecodeStatus.INVALID
    assert backend.kv_length(0) == 0


@pytest.mark.parametrize(
    "positions",
    [[1], [0, 2], [0, 0], [1, 0], [-1, 0], [0, 1, 1], [0, 1, 3]],
    ids=str,
)
def test_positions_of_an_empty_slot_begin_at_0_and_are_consecutive(
    backend: Backend, positions: list[int]
) -> None:
    """Gaps, repeats and wrong beginnings are invalid and change nothing."""
    rows = [(1, position, 97, 0) for position in positions]
    assert decode(backend, rows) == DecodeStatus.INVALID
    assert backend.kv_length(1) == 0


@pytest.mark.parametrize("position", [0, 4, 6])
def test_positions_go_on_where_the_slot_ends(backend: Backend, position: int) -> None:
    """After five tokens only position 5 is valid."""
    feed(backend, 2, text(1, 5))
    assert decode(backend, [(2, position, 97, 1)]) == DecodeStatus.INVALID
    assert backend.kv_length(2) == 5
    assert decode(backend, [(2, 5, 97, 1)]) == DecodeStatus.OK


def test_rows_of_a_slot_need_not_be_neighbours(backend: Backend) -> None:
    """Two slots may alternate within a batch if each is consecutive."""
    rows = [(slot, position, 97 + position, 0) for position in range(4) for slot in (3, 1)]
    assert decode(backend, rows) == DecodeStatus.OK
    assert (backend.kv_length(1), backend.kv_length(3)) == (4, 4)


def test_logits_come_for_wanted_rows_only_in_batch_order(backend: Backend) -> None:
    """Row k of the logits belongs to the k-th wanted row, whichever slot it is of."""
    one, two, three = text(1, 9), text(2, 5), text(3, 7)
    alone = {slot: feed(backend, slot, tokens) for slot, tokens in enumerate((one, two, three))}
    for slot in range(3):
        assert backend.kv_remove(slot)
    rows = [*prompt(2, three), *prompt(0, one, want=False), *prompt(1, two)]
    assert decode(backend, rows) == DecodeStatus.OK
    logits = backend.logits(2)
    assert logits.shape[0] == 2
    assert_same(logits[0], alone[2])
    assert_same(logits[1], alone[1])


def test_wanting_nothing_is_allowed(backend: Backend) -> None:
    """A chunk in the middle of a prompt has no row of logits."""
    assert decode(backend, prompt(0, text(1, 20), want=False)) == DecodeStatus.OK
    assert backend.logits(0).shape[0] == 0


@pytest.mark.parametrize("chunk", [1, 2, 7, 63])
def test_chunks_give_what_the_whole_gives(backend: Backend, chunk: int) -> None:
    """A prompt in pieces leads to the same next token as in one go."""
    tokens = text(4, 60)
    assert_same(feed(backend, 0, tokens, chunk), feed(backend, 1, tokens))


def test_slots_side_by_side_do_not_mix(backend: Backend) -> None:
    """Sequences that grow together choose what each chooses alone."""
    prompts = [text(seed, 8 + seed) for seed in range(N_SLOTS)]
    alone: list[FloatArray] = []
    tails = [text(10 + seed, 6) for seed in range(N_SLOTS)]
    for tokens, tail in zip(prompts, tails, strict=True):
        alone.append(feed(backend, 0, tokens + tail))
        assert backend.kv_remove(0)
    for slot, tokens in enumerate(prompts):
        feed(backend, slot, tokens)
    for step in range(6):
        rows = [(slot, len(prompts[slot]) + step, tails[slot][step], 1) for slot in (2, 0, 3, 1)]
        assert decode(backend, rows) == DecodeStatus.OK
    together = backend.logits(N_SLOTS)
    for row, slot in enumerate((2, 0, 3, 1)):
        assert_same(together[row], alone[slot])


def test_the_history_decides_the_logits(backend: Backend) -> None:
    """The check for mixed-up slots has power: another history gives other logits."""
    one, two = feed(backend, 0, text(1, 30)), feed(backend, 1, text(2, 30))
    assert float(np.abs(one - two).max()) > 10 * NEAR


def test_a_full_cache_is_no_room_and_changes_nothing(backend: Backend) -> None:
    """When cells run out nothing is computed, and going on is possible once there is room."""
    if backend.limits.n_streams > 1:
        pytest.skip("a stream's cells are for its own sequence: test_kv_streams has no room there")
    for slot in range(2):
        feed(backend, slot, text(slot, N_CTX // 2 - 4))
    assert decode(backend, prompt(2, text(2, 9))) == DecodeStatus.NO_KV_ROOM
    lengths = [backend.kv_length(slot) for slot in range(N_SLOTS)]
    assert lengths == [N_CTX // 2 - 4, N_CTX // 2 - 4, 0, 0]
    assert decode(backend, prompt(2, text(2, 8))) == DecodeStatus.OK
    assert decode(backend, [(0, N_CTX // 2 - 4, 97, 1)]) == DecodeStatus.NO_KV_ROOM
    assert backend.kv_remove(1)
    assert backend.kv_remove(2)
    assert decode(backend, [(0, N_CTX // 2 - 4, 97, 1)]) == DecodeStatus.OK
    assert_same(backend.logits(1)[0], feed(backend, 1, [*text(0, N_CTX // 2 - 4), 97]))


def test_an_emptied_slot_begins_anew(backend: Backend) -> None:
    """After everything was dropped the slot knows nothing of the sequence before."""
    fresh = feed(backend, 0, text(1, 12))
    assert backend.kv_remove(0)
    assert backend.kv_length(0) == 0
    feed(backend, 0, text(2, 30))
    assert backend.kv_remove(0)
    assert_same(feed(backend, 0, text(1, 12)), fresh)


def test_a_retired_slot_begins_anew_and_changes_nobody(backend: Backend) -> None:
    """Whatever of it stays in the cache, nobody looks at it, the slot itself included."""
    fresh, other = feed(backend, 0, text(1, 12)), feed(backend, 1, text(3, 20))
    for _ in range(70):
        backend.kv_retire(0)
        assert backend.kv_length(0) == 0
        assert_same(feed(backend, 0, text(1, 12)), fresh)
    backend.kv_retire(1)
    assert_same(feed(backend, 1, text(3, 20)), other)
    backend.kv_lower_high_water()
    assert (backend.kv_length(0), backend.kv_length(1)) == (12, 20)
    assert_same(feed(backend, 2, text(3, 20)), other)


@pytest.mark.real
def test_no_more_than_some_cells_stay_of_retired_slots(tiny_model: Path) -> None:
    """Whatever their positions: sequences of one length are the usual case."""
    from uma_trio.backend._llama_memory import MOST_KEPT
    from uma_trio.backend.llama import LlamaBackend

    backend = LlamaBackend.load(
        tiny_model, n_ctx=N_CTX, n_slots=2, n_batch=N_BATCH, threads=1, holds_extent=True
    )
    most = N_CTX - MOST_KEPT
    for _ in range(MOST_KEPT):
        assert decode(backend, [(0, 0, 97, 1)]) == DecodeStatus.OK
        backend.kv_retire(0)
    for begin in range(0, most, N_BATCH):
        assert decode(backend, prompt(0, text(1, N_BATCH), begin)) == DecodeStatus.OK
    assert backend._kv.map is not None
    assert backend._kv.kept == MOST_KEPT
    assert decode(backend, [(0, most, 97, 1)]) == DecodeStatus.OK, "theirs is the room, too"
    assert backend._kv.kept == 0
    backend.close()


def test_all_cells_of_retired_slots_are_there_for_others(backend: Backend) -> None:
    """What stays of them is no room lost."""
    if backend.limits.n_streams > 1:
        pytest.skip("a stream's cells are for its own sequence: test_kv_streams has no room there")
    for slot in range(3):
        feed(backend, slot, text(slot, 60))
    for slot in range(3):
        backend.kv_retire(slot)
    whole = feed(backend, 0, text(7, N_CTX - 1))
    assert decode(backend, [(0, N_CTX - 1, 97, 1)]) == DecodeStatus.OK
    assert decode(backend, [(1, 0, 97, 1)]) == DecodeStatus.NO_KV_ROOM
    backend.kv_retire(0)
    assert_same(feed(backend, 3, text(7, N_CTX - 1)), whole)


def test_retiring_an_empty_slot_is_allowed(backend: Backend) -> None:
    """A request that is cancelled before its first tick holds nothing."""
    backend.kv_retire(2)
    backend.kv_lower_high_water()
    assert backend.kv_length(2) == 0


def test_a_part_can_be_dropped_from_the_end(backend: Backend) -> None:
    """A sequence cut back and continued equals one that always was like that."""
    want = feed(backend, 0, text(1, 20) + text(2, 5))
    feed(backend, 1, text(1, 20) + text(3, 9))
    assert backend.kv_remove(1, 20)
    assert backend.kv_length(1) == 20
    assert decode(backend, prompt(1, text(2, 5), 20)) == DecodeStatus.OK
    assert_same(backend.logits(1)[0], want)


def test_dropping_nothing_is_allowed(backend: Backend) -> None:
    """An empty slot can be emptied, and cells behind the end be dropped."""
    assert backend.kv_remove(3)
    feed(backend, 3, text(1, 4))
    assert backend.kv_remove(3, 4)
    assert backend.kv_length(3) == 4


def test_an_aside_is_called_once_by_every_decode_before_it_returns(backend: Backend) -> None:
    """Whether it works, is invalid, finds no room or is interrupted."""
    if backend.limits.n_streams > 1:
        pytest.skip("a stream's cells are for its own sequence: test_kv_streams has no room there")
    asides: list[int] = []

    def statuses() -> Iterator[int]:
        yield decode(backend, prompt(0, text(1, 10)), lambda: asides.append(1))
        yield decode(backend, [(0, 3, 97, 1)], lambda: asides.append(2))
        yield backend.decode(0, lambda: asides.append(3))
        for slot in range(1, N_SLOTS):
            feed(backend, slot, text(slot, (N_CTX - 12) // (N_SLOTS - 1)))
        yield decode(backend, prompt(0, text(1, 40), 10), lambda: asides.append(4))
        interrupt = backend.arm()
        if interrupt is not None:
            interrupt()
            yield decode(backend, [(0, 10, 97, 1)], lambda: asides.append(5))

    expected = [DecodeStatus.OK, DecodeStatus.INVALID, DecodeStatus.INVALID]
    expected += [DecodeStatus.NO_KV_ROOM, DecodeStatus.ABORTED]
    for n, status in enumerate(statuses()):
        assert status == expected[n]
        assert asides == list(range(1, n + 2))


def test_an_aside_changes_no_logits(backend: Backend) -> None:
    """What is computed is what would have been computed without it."""
    want = feed(backend, 0, text(1, 40))
    assert decode(backend, prompt(1, text(1, 40)), lambda: [0] * 1000) == DecodeStatus.OK
    assert_same(backend.logits(1)[0], want)


def armed(backend: Backend) -> Interrupt:
    """Return what interrupts the next decode."""
    interrupt = backend.arm()
    if interrupt is None:
        pytest.skip("this machine's hardware does not ask whether to go on")
    return interrupt


def test_an_interrupted_decode_is_as_if_it_had_never_been(backend: Backend) -> None:
    """No slot gains or loses a cell, and the same batch then gives what it would have given."""
    tokens, other = text(1, 60), text(2, 9)
    want = feed(backend, 0, tokens + tokens[::-1], chunk=60)
    assert backend.kv_remove(0)
    feed(backend, 0, tokens)
    feed(backend, 1, other)
    armed(backend)()
    rows = prompt(0, tokens[::-1], 60) + prompt(2, [97, 98])
    assert decode(backend, rows) == DecodeStatus.ABORTED
    assert [backend.kv_length(slot) for slot in range(N_SLOTS)] == [60, 9, 0, 0]
    assert decode(backend, rows) == DecodeStatus.OK
    assert_same(backend.logits(2)[0], want)
    assert decode(backend, [(1, 9, 97, 1)]) == DecodeStatus.OK
    assert_same(backend.logits(1)[0], feed(backend, 3, [*other, 97]))


def test_an_armed_decode_that_nobody_interrupts_is_like_any_other(backend: Backend) -> None:
    """To be interruptible changes nothing."""
    want = feed(backend, 0, text(1, 40))
    armed(backend)
    assert_same(feed(backend, 1, text(1, 40)), want)


def test_an_interrupt_reaches_one_decode_and_no_other(backend: Backend) -> None:
    """One that comes late, or twice, is nobody's: neither an armed decode's nor another's."""
    late = armed(backend)
    feed(backend, 0, text(1, 5))
    late()
    assert decode(backend, [(0, 5, 97, 1)]) == DecodeStatus.OK
    used = armed(backend)
    used()
    assert decode(backend, [(0, 6, 97, 1)]) == DecodeStatus.ABORTED
    used()
    assert decode(backend, [(0, 6, 97, 1)]) == DecodeStatus.OK
    armed(backend)
    late()
    used()
    assert decode(backend, [(0, 7, 97, 1)]) == DecodeStatus.OK


def test_a_decode_that_was_invalid_is_not_armed_any_more(backend: Backend) -> None:
    """Whatever became of the armed decode, the next one is another."""
    interrupt = armed(backend)
    assert backend.decode(0) == DecodeStatus.INVALID
    interrupt()
    assert decode(backend, prompt(0, text(1, 5))) == DecodeStatus.OK


def test_an_interrupt_from_another_thread_leaves_all_or_nothing(backend: Backend) -> None:
    """Wherever it hits, the batch is computed whole or not at all, and can be done again."""
    tokens = text(1, N_BATCH)
    want = feed(backend, 0, tokens)
    for _ in range(20):
        assert backend.kv_remove(0)
        thread = threading.Thread(target=armed(backend))
        thread.start()
        status = decode(backend, prompt(0, tokens))
        thread.join()
        assert status in (DecodeStatus.OK, DecodeStatus.ABORTED)
        done = status == DecodeStatus.OK
        assert backend.kv_length(0) == (N_BATCH if done else 0)
        assert_same(backend.logits(1)[0] if done else feed(backend, 0, tokens), want)


def test_an_interrupt_after_the_end_does_nothing(backend: Backend) -> None:
    """Whoever holds one may be slower than the backend."""
    interrupt = armed(backend)
    backend.close()
    interrupt()


def test_slots_are_reused_for_ever(backend: Backend) -> None:
    """After many times more tokens than cells, slots work as at first, and all room is back."""
    fresh = feed(backend, 0, text(1, 12))
    for turn in range(60):
        slot = turn % N_SLOTS
        assert backend.kv_remove(slot)
        feed(backend, slot, text(turn, 100 + turn % 7))
    for slot in range(N_SLOTS):
        assert backend.kv_remove(slot)
    assert_same(feed(backend, 0, text(1, 12)), fresh)
    assert backend.kv_remove(0)
    feed(backend, 1, text(9, N_CTX))
    assert backend.kv_length(1) == N_CTX


def test_logits_are_a_view_that_stays_in_place(backend: Backend) -> None:
    """No tick copies logits: rows of later decodes lie where those of earlier ones lay."""
    feed(backend, 0, text(1, 5))
    addresses = set()
    for step in range(4):
        assert decode(backend, [(0, 5 + step, 98, 1)]) == DecodeStatus.OK
        addresses.add(backend.logits(1).ctypes.data)
    assert len(addresses) == 1


def test_the_vocabulary_gives_back_what_it_was_given(backend: Backend) -> None:
    """Tokens of a text, put together again, are its bytes; end tokens have none."""
    vocabulary = backend.vocabulary
    written = "Hello, wörld! 漢字 \U0001f98a\n  <|im_end|>"
    tokens = vocabulary.tokenize(written, add_special=False, parse_special=False)
    pieces = vocabulary.pieces()
    assert len(pieces) == vocabulary.n_vocab == backend.model.n_vocab
    assert b"".join(pieces[token] for token in tokens) == written.encode()
    assert vocabulary.end_tokens
    assert not any(pieces[token] for token in vocabulary.end_tokens)
    assert not vocabulary.end_tokens & set(tokens.tolist())


def test_special_tokens_are_parsed_only_when_asked(backend: Backend) -> None:
    """The same text is one control token or plain characters."""
    tokenize = backend.vocabulary.tokenize
    special = tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert len(special) == 1
    assert int(special[0]) in backend.vocabulary.end_tokens


def test_closing_twice_is_allowed(backend: Backend) -> None:
    """The second close does nothing."""
    backend.close()
    backend.close()
