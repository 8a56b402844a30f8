"""The options about what compiling a schema, grammar or expression may take."""

from __future__ import annotations

from attrs import frozen

from uma_trio.config.option import n_bytes, option, seconds


@frozen(kw_only=True)
class ShapeConfig:
    """What a shape may take."""

    shape_cpu_s: float = option(
        2.0,
        flag="--shape-cpu",
        yaml=("limits.shape_cpu_s",),
        read=seconds,
        metavar="TIME",
        minimum=0.1,
        maximum=10,
        unit="s",
        since="0.1",
        help="The CPU time that compiling one schema, grammar or expression may take, and one step of "
        "a grammar that is followed in a process of its own. One that takes more is refused.",
    )
    shape_memory: int = option(
        64 << 20,
        flag="--shape-memory",
        yaml=("limits.shape_memory",),
        read=n_bytes,
        metavar="BYTES",
        minimum=16 << 20,
        maximum=16 << 30,
        since="0.1",
        help="The memory that compiling or following one schema, grammar or expression may take, such "
        "as 64MiB. One that takes more is refused.",
    )
