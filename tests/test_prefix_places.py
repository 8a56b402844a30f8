"""Where the cells of a request lie that is alone and asks for an answer that can be had again."""

from __future__ import annotations

import pytest
from attrs import evolve
from engine_kit import Bench
from test_prefix_cache import MIB, MINE, ask, letters, save_all

from uma_trio.engine.planner import EngineSettings
from uma_trio_sim.fake import FakeBackend

NAMED: dict[str, object] = {"temperature": 0.9, "seed": 3, "seed_named": True}
DRAWN: dict[str, object] = {"temperature": 0.9, "seed": 3}
GREEDY: dict[str, object] = {"temperature": 0.0}


def bench(*, whole_cache: bool = True) -> Bench:
    """Return an engine with the prefix cache; without flash attention if `whole_cache`."""
    backend = FakeBackend(n_ctx=4096, n_slots=4, n_rows=8, n_batch=64)
    backend.limits = evolve(backend.limits, whole_cache=whole_cache)
    return Bench(backend, settings=EngineSettings(prefix_bytes=MIB, scratch_slots=1))


def leaves_after(made: Bench, params: dict[str, object]) -> int:
    """Return how many leaves hold cells while a new request with `params` computes."""
    made.submit(letters(5, 50), 8, namespace=MINE, **params)  # type: ignore[arg-type]
    made.ticks(2)
    return len(made.engine.cells.prefix.leaves)


@pytest.mark.parametrize(("params", "left"), [(NAMED, 0), (GREEDY, 0), (DRAWN, 1)])
def test_who_may_ask_again_begins_in_an_empty_cache(params: dict[str, object], left: int) -> None:
    """A seed or temperature 0 takes saved leaves out of the KV cache; a random seed does not."""
    made = bench()
    ask(made, letters(1, 200))
    save_all(made)
    assert leaves_after(made, params) == left


def test_with_flash_attention_nothing_leaves() -> None:
    """Places change no sums there."""
    made = bench(whole_cache=False)
    ask(made, letters(1, 200))
    save_all(made)
    assert leaves_after(made, NAMED) == 1


def test_beside_another_nothing_leaves() -> None:
    """Who is not alone gets no empty cache, and takes nobody's prefix."""
    made = bench()
    ask(made, letters(1, 200))
    save_all(made)
    made.submit(letters(7, 20), 60, namespace=MINE, **DRAWN)  # type: ignore[arg-type]
    made.ticks(2)
    assert leaves_after(made, NAMED) == 1


def test_what_left_is_restored() -> None:
    """The prefix of the request itself comes back from memory, page by page."""
    made = bench()
    prompt = letters(1, 300)
    ask(made, prompt)
    save_all(made)
    assert ask(made, [*prompt, *letters(2, 9)]).end.cached_tokens >= 256


@pytest.mark.parametrize(("whole_cache", "computed"), [(True, 2), (False, 1)])
def test_a_hit_leaves_two_tokens_where_one_row_is_summed_otherwise(
    whole_cache: bool, computed: int
) -> None:
    """With flash attention the last token is enough."""
    made = bench(whole_cache=whole_cache)
    prompt = letters(1, 100)
    ask(made, prompt)
    made.submit(prompt, 4, namespace=MINE, **DRAWN)  # type: ignore[arg-type]
    made.run()
    assert made.engine.cells.prefix.tokens_saved == len(prompt) - computed


@pytest.mark.parametrize(("whole_cache", "rows"), [(True, 2), (False, 1)])
def test_the_last_token_of_a_prompt_is_no_single_row(whole_cache: bool, rows: int) -> None:
    """A prompt of one token gets a row of ballast; a token of an answer gets none."""
    made = bench(whole_cache=whole_cache)
    sizes: list[int] = []
    decode = made.backend.decode

    def seen(n_tokens: int, *others: object) -> int:
        sizes.append(n_tokens)
        return decode(n_tokens, *others)  # type: ignore[arg-type]

    made.backend.decode = seen  # type: ignore[method-assign]
    ask(made, letters(1, 1), 4)
    assert sizes == [rows, 1, 1, 1]
