"""The tokenizer: byte-level BPE, trained on the corpus itself."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.storyteller import corpus

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 3072
SPECIAL = (corpus.TEXT_END, corpus.START, corpus.END)


def train(out: Path, documents: int, workers: int, size: int = SIZE) -> Tokenizer:
    """Train the tokenizer on freshly drawn documents and save it."""
    share = -(-documents // workers)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        drawn = pool.map(partial(corpus.texts, count=share), range(workers))
        lines = [text for part in drawn for text in part]
    for mark in SPECIAL:
        lines = [line.replace(mark, "\n") for line in lines]
    tokenizer = Tokenizer(models.BPE())
    # Single digits, then GPT-2's word pattern: what llama.cpp calls "smollm".
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(mark, special=True) for mark in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(out))
    return tokenizer
