"""The options about models that make vectors and scores of texts."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from uma_trio.config.option import option, seconds
from uma_trio.config.shapes import ShapeConfig


@frozen(kw_only=True)
class EncoderConfig(ShapeConfig):
    """Which models are loaded beside the one that writes."""

    embedding_model: Path | None = option(
        None,
        flag="--embedding-model",
        env=("UMA_EMBEDDING_MODEL",),
        shown_default="none",
        metavar="MODEL",
        since="0.1",
        help="A second model, which makes vectors of texts (/v1/embeddings, `uma-trio embed`): a GGUF file of a "
        "BERT kind (bge, nomic-embed, MiniLM, e5) or of Qwen3-Embedding, or a name that `uma-trio models` lists. "
        "It computes on the CPU, in the time that streams leave it.",
    )
    rerank_model: Path | None = option(
        None,
        flag="--rerank-model",
        env=("UMA_RERANK_MODEL",),
        shown_default="none",
        metavar="MODEL",
        since="0.1",
        help="A model that scores how well documents fit a query (/v1/rerank, `uma-trio rerank`): a GGUF file of a "
        "reranker (bge-reranker, jina-reranker, Qwen3-Reranker), or a name that `uma-trio models` lists.",
    )
    encoder_ttl_s: float | None = option(
        None,
        flag="--encoder-ttl",
        env=("UMA_ENCODER_TTL",),
        shown_default="they stay",
        since="0.1",
        read=seconds,
        metavar="TIME",
        minimum=1,
        maximum=31_536_000,
        unit="s",
        help="How long the models of --embedding-model and --rerank-model stay in memory while nobody asks them: "
        "then they are loaded by the first request, which waits for it.",
    )
