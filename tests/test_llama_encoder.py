"""llama.cpp's encoders: the same vectors in any company and however often they pause; files that end the process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")


from damage_kit import with_float

from models.encoders import EncoderShape, write_encoder
from models.synthetic import PRESETS, write_model
from uma_trio.app import build
from uma_trio.backend import _llama_lib as lib
from uma_trio.backend.base import FloatArray, IntArray, ModelError
from uma_trio.backend.llama_encoder import LlamaEncoder
from uma_trio.backend.llama_probe import probe, try_computing
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.models.files import kind_of

pytestmark = pytest.mark.real

POOLINGS = ("mean", "cls", "last", "none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return where models are written."""
    return tmp_path


def loaded(path: Path, shape: EncoderShape) -> LlamaEncoder:
    """Return an encoder of this shape."""
    return LlamaEncoder.load(write_encoder(path / "encoder.gguf", shape), threads=1)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaEncoder]:
    """Return an encoder that makes vectors."""
    path = tmp_path_factory.mktemp("encoder")
    found = loaded(path, EncoderShape(layers=3, width=96, ffn=192))
    yield found
    found.close()


def texts(encoder: LlamaEncoder, *given: str) -> list[IntArray]:
    """Return texts as tokens."""
    tokenize = encoder.vocabulary.tokenize
    return [tokenize(text, add_special=True, parse_special=False) for text in given]


def computed(
    encoder: LlamaEncoder, inputs: Sequence[IntArray], most_s: float = math.inf
) -> tuple[FloatArray, int]:
    """Return the vectors of inputs, and in how many parts they were computed."""
    encoder.begin(inputs)
    parts = 1
    while (vectors := encoder.advance(most_s)) is None:
        parts += 1
    return vectors, parts


def test_a_step_in_many_parts_has_the_same_bits(encoder: LlamaEncoder) -> None:
    """Whatever is done between two of them."""
    inputs = texts(encoder, "the fox and the lantern " * 4, "the sea")
    whole, _ = computed(encoder, inputs)
    encoder._parts._node_s[:] = 1.0
    apart, parts = computed(encoder, inputs, 0.0)
    assert parts > 20
    assert np.array_equal(whole, apart)


def test_the_vector_of_a_text_is_the_same_alone_and_in_a_crowd(encoder: LlamaEncoder) -> None:
    """But for the order in which numbers are added."""
    crowd = texts(encoder, *(f"text {n} of many " * (n % 5 + 1) for n in range(7)))
    together, _ = computed(encoder, crowd)
    for tokens, vector in zip(crowd, together, strict=True):
        ((alone,), _) = computed(encoder, [tokens])
        cosine = alone @ vector / np.linalg.norm(alone) / np.linalg.norm(vector)
        assert cosine >= 0.9999


def test_a_step_that_is_dropped_leaves_the_encoder_usable(encoder: LlamaEncoder) -> None:
    """At any part."""
    first, second = texts(encoder, "some words", "other words " * 5)
    before, _ = computed(encoder, [first])
    for _ in range(3):
        encoder.begin([second])
        encoder.advance(0.0)
        encoder.drop()
    after, _ = computed(encoder, [first])
    assert np.array_equal(before, after)


@pytest.mark.parametrize(
    "lengths",
    [[0], [], [129], [100] * 3, [1] * 257],
    ids=["empty", "none", "long", "large", "many"],
)
def test_what_would_end_the_process_is_an_error_before(
    encoder: LlamaEncoder, lengths: list[int]
) -> None:
    """llama.cpp asserts that a step fits."""
    with pytest.raises(ValueError, match="token"):
        encoder.begin([np.full(n, 5, np.int32) for n in lengths])


def test_a_step_that_is_dropped_writes_no_error(encoder: LlamaEncoder) -> None:
    """llama.cpp calls it a failure; it is what a cancelled request asks for."""
    lines: list[str] = []
    lib.set_log_sink(lambda _level, line: lines.append(line))
    try:
        encoder._parts._node_s[:] = 1.0
        encoder.begin(texts(encoder, "a text that is given up"))
        assert encoder.advance(0.0) is None
        encoder.drop()
    finally:
        lib.set_log_sink(None)
    assert not lines


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_makes_one_vector_of_a_text(folder: Path, pooling: str) -> None:
    """A file that names none has the mean."""
    encoder = loaded(folder, EncoderShape(pooling=pooling))  # type: ignore[arg-type]
    vectors, _ = computed(encoder, texts(encoder, "one", "two words"))
    assert vectors.shape == (2, 64)
    assert encoder.info.pooling == ("mean" if pooling == "none" else pooling)
    assert not encoder.info.ranks
    encoder.close()


def test_a_reranker_makes_a_score_and_says_what_it_is_of(folder: Path) -> None:
    """One number for each label."""
    encoder = loaded(folder, EncoderShape(pooling="rank", labels=2))
    scores, _ = computed(encoder, texts(encoder, "one", "two words"))
    assert scores.shape == (2, 2)
    assert encoder.info.labels == ("label 0", "label 1")
    assert encoder.info.pair.before == (2,)
    encoder.close()


CAUSAL = EncoderShape(causal=True, pooling="last", context=2048)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaEncoder]:
    """Return a causal model whose last token is the vector."""
    found = loaded(tmp_path_factory.mktemp("causal"), CAUSAL)
    yield found
    found.close()


def cosines(one: FloatArray, other: FloatArray) -> FloatArray:
    """Return how alike the vectors of two lists are, one by one."""
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.asarray((one * other).sum(axis=1) / lengths)


def rows_of(encoder: LlamaEncoder) -> list[int]:
    """Return a list to which the tokens of each chunk are added as it is computed."""
    seen: list[int] = []
    begin = encoder._parts.begin

    def note(n_tokens: int) -> None:
        seen.append(n_tokens)
        begin(n_tokens)

    encoder._parts.begin = note  # type: ignore[method-assign]
    return seen


def test_a_causal_model_makes_the_vector_of_the_last_token(causal: LlamaEncoder) -> None:
    """Alone and in a crowd, and in chunks as in one: a text of three chunks differs by nothing but rounding."""
    assert (causal.info.pooling, causal.info.n_ctx, causal.info.width) == ("last", 2048, 64)
    crowd = texts(causal, *(f"text {n} of many " * (n % 3 + 1) for n in range(4)))
    together, _ = computed(causal, crowd)
    alone = np.concatenate([computed(causal, [tokens])[0] for tokens in crowd])
    assert cosines(alone, together).min() >= 0.9999
    long = texts(causal, "the fox and the lantern " * 30)
    seen = rows_of(causal)
    chunks, _ = computed(causal, long)
    assert len(seen) >= 3
    causal._beginning.clear()  # type: ignore[union-attr]
    apart, parts = computed(causal, long, 0.0)
    assert parts > len(seen)
    assert cosines(chunks, apart).min() >= 0.9999


def test_what_inputs_begin_with_is_computed_once(causal: LlamaEncoder) -> None:
    """The second step has only the rest of its inputs, and the same vectors but for rounding."""
    causal._beginning.clear()  # type: ignore[union-attr]
    instruction = "Instruct: find what answers the question. Query: "
    first = texts(causal, instruction + "1?", instruction + "2?")
    expected, _ = computed(causal, first)
    seen = rows_of(causal)
    second, _ = computed(causal, first)
    assert seen == [sum(map(len, first)) - 2 * len(texts(causal, instruction)[0][:-1])]
    assert cosines(expected, second).min() >= 0.9999
    other, _ = computed(causal, texts(causal, "something else"))
    again, _ = computed(causal, first[:1])
    assert cosines(again, expected[:1]).min() >= 0.9999
    assert cosines(other, expected[:1]).max() < 0.9999


def test_what_one_user_sent_makes_no_input_of_another_quicker(causal: LlamaEncoder) -> None:
    """In the same step and in later ones; their own inputs go on from what is kept."""
    causal._beginning.clear()  # type: ignore[union-attr]
    told = "the secret of the lantern is that it has no oil. "
    mine = texts(causal, told + "1?", told + "2?")
    seen = rows_of(causal)
    whole = [len(tokens) for tokens in mine]
    for inputs, users in (
        (mine, ["a", "a"]),
        (mine[:1], ["b"]),
        (mine, ["b", "c"]),
        (mine[:1], ["c"]),
    ):
        causal.begin(inputs, users)
        assert causal.advance(math.inf) is not None
    assert seen == [sum(whole), whole[0], sum(whole), whole[0]]
    causal.begin(mine[:1], ["c"])
    assert causal.advance(math.inf) is not None
    assert seen[-1] < whole[0]


def test_a_causal_step_that_is_dropped_leaves_nothing(causal: LlamaEncoder) -> None:
    """At any part; the next step has the vectors that it had before."""
    first, second = texts(causal, "some words of a text", "other words " * 60)
    before, _ = computed(causal, [first])
    for _ in range(3):
        causal.begin([second])
        causal.advance(0.0)
        causal.drop()
    after, _ = computed(causal, [first])
    assert cosines(before, after).min() >= 0.9999


def test_a_causal_reranker_has_its_template_around_the_texts(folder: Path) -> None:
    """Marks of the template are control tokens, those in texts are text, and a score is one of its labels."""
    shape = EncoderShape(causal=True, pooling="rank", labels=2, context=512)
    encoder = loaded(folder, shape)
    vocabulary, pair = encoder.vocabulary, encoder.info.pair
    (mark,) = vocabulary.tokenize("<|im_start|>", add_special=False, parse_special=True).tolist()
    assert pair.before[0] == mark
    assert (pair.around_query, pair.around_document) == ((" ", "\n"), (" ", ""))
    assert len(vocabulary.tokenize("<|im_start|>", add_special=False, parse_special=False)) > 1
    scores, _ = computed(encoder, texts(encoder, "one", "two words"))
    assert scores.sum(axis=1) == pytest.approx([1, 1], abs=1e-5)  # Qwen3's softmax
    encoder.close()


def test_the_probe_counts_the_cache_of_a_causal_model(folder: Path) -> None:
    """With the cells for the longest input and what is kept beside it."""
    path = write_encoder(folder / "causal.gguf", CAUSAL)
    assert probe(path).compute > 2 * 2 * 32 * 2 * (2048 + 1024)


def test_the_probe_says_what_is_needed(folder: Path) -> None:
    """Weights and the buffer to compute in, without having either."""
    path = write_encoder(folder / "encoder.gguf", EncoderShape(layers=4, width=256, ffn=512))
    needs = probe(path)
    assert needs.own > 4 * 256 * 512 * 4
    assert 0 < needs.compute < needs.own


def test_a_damaged_file_ends_the_probe_and_nothing_else(folder: Path) -> None:
    """Cut, of another kind, or none at all: an error with the reason."""
    whole = write_encoder(folder / "encoder.gguf").read_bytes()
    cut = folder / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="is truncated"):
        probe(cut)
    with pytest.raises(ModelError, match="no encoder"):
        probe(write_model(folder / "writes.gguf", PRESETS["tiny"]))
    with pytest.raises(ModelError, match="no model file"):
        probe(folder / "missing.gguf")


def test_an_encoder_that_asserts_while_it_computes_is_an_error(folder: Path) -> None:
    """Its file is sound for all that only loads it."""
    path = write_encoder(folder / "negative.gguf")
    with_float(path, "layer_norm_epsilon", -1.0)
    assert probe(path).own > 0
    with pytest.raises(ModelError, match=r"GGML_ASSERT\(eps"):
        try_computing(path, None)


def test_a_sound_encoder_computes(folder: Path) -> None:
    """With a cache and without one, and as a reranker."""
    for shape in (EncoderShape(), EncoderShape(pooling="rank")):
        try_computing(write_encoder(folder / f"{shape.pooling}.gguf", shape), None)


@pytest.mark.parametrize(
    ("shape", "gives"),
    [
        (EncoderShape(), "vectors"),
        (EncoderShape(pooling="rank"), "scores"),
        (CAUSAL, "vectors"),
        (EncoderShape(causal=True, pooling="rank"), "scores"),
    ],
)
def test_the_file_says_what_a_model_gives(folder: Path, shape: EncoderShape, gives: str) -> None:
    """Whichever option it is named by; one that is named as another kind is refused with the flag for it."""
    path = write_encoder(folder / "model.gguf", shape)
    assert kind_of(Config(model=path)) == gives
    other = "rerank_model" if gives == "vectors" else "embedding_model"
    (_, asked) = Config(**{other: path}).each()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="use --"):
        kind_of(asked)


def test_an_encoder_that_does_not_fit_is_refused_with_the_sum(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a byte of it is loaded."""
    monkeypatch.setattr(build, "available_memory", lambda: 1000)
    config = Config(model=write_encoder(folder / "embeds.gguf"), threads=1)
    with pytest.raises(ModelError, match="MiB are free"):
        build.refuse_encoder_without_room(config)
