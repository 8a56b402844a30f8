"""`uma-trio help`: the help of a command, and the references of all settings and metrics."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from uma_trio.cli.output import OK, USAGE, complain, program
from uma_trio.cli.parser import Parameter, run_verbs
from uma_trio.cli.verbs import VERBS
from uma_trio.words import nearest

if TYPE_CHECKING:
    from uma_trio.config.option import Option

_WIDEST = 100

CONFIG_HEAD = """\
Settings of the daemon. A flag takes precedence over the environment, the environment over the YAML file, and the \
file over the default.

The file is the one of --config or UMA_CONFIG, else ~/.config/uma-trio/config.yaml. Its keys are the names of the \
flags with underscores, as in `n_ctx: 16384`. Times take a unit (300, 300s, 5m, 500ms), sizes too (512MiB, 2GiB). The \
environment variable is UMA_ and the key in capitals. Unknown keys, flags and misspelt variables are refused.

The section `models` of the file has further models, each with the settings that differ from the daemon's:

    models:
      code: {model: qwen2.5-coder:7b, n_ctx: 32768, aliases: [gpt-4o], ttl: 10m}
      embed: {model: /models/bge-m3-Q8_0.gguf, load: on-demand}

A model takes `load` (start, on-demand, explicit), `ttl`, `pin`, `hidden`, `aliases`, `defaults` (such as \
{temperature: 0.7}), and the settings """
METRICS_HEAD = """\
Metrics of the daemon: `uma-trio metrics --all`, `--json` and `--prometheus`, and GET /metrics. Each has its name in \
JSON and, if it differs, its name in Prometheus' text after uma_ (- if there is none, since a scraper computes it). \
There times are in seconds and sizes in bytes. A value that is not known yet is null. A histogram in JSON is an object \
with count, sum, mean, p50, p95, p99 (accurate to 1 %), max and cumulative buckets.

With several models, metrics have the label `model`, and JSON has them in `models`. The Prometheus text also has \
llama-server's names (llamacpp:) and those of vLLM's routers (vllm:). Only operators see counts of tokens, cells and \
batches, since their differences are lengths of requests."""


def show_help(
    topic: Annotated[
        str, Parameter(help="A command, or config, or metrics.", metavar="TOPIC")
    ] = "",
    /,
) -> int:
    """Describe a command, every setting (config) or every metric (metrics)."""
    pages = {"config": config_lines, "metrics": metric_lines}
    if topic in pages:
        for line in pages[topic]():
            sys.stdout.write(f"{line}\n")
        return OK
    if topic and topic not in VERBS:
        guess = nearest(topic, (*pages, *VERBS))
        complain(f"There is no help on {topic}{guess}; name a command, config or metrics.")
        return USAGE
    run_verbs(program(), [topic, "--help"] if topic else ["--help"])
    return OK


def config_lines() -> Iterator[str]:
    """Yield the reference of all settings."""
    from uma_trio.config.models import OF_A_MODEL
    from uma_trio.config.options import OPTIONS, grouped
    from uma_trio.config.settings import RESERVED, SECTIONS

    own = ", ".join(item.key for item in OPTIONS if item.name in OF_A_MODEL)
    yield from _wrapped(f"{CONFIG_HEAD}{own}.")
    for heading, items in grouped().items():
        yield ""
        yield heading.upper()
        for item in items:
            yield ""
            yield from _option(item)
    yield ""
    yield "OTHER SPELLINGS"
    yield ""
    for key, ours in SECTIONS.items():
        yield f"  {key} is {ours}"
    for each in RESERVED:
        names = " and ".join(filter(None, (each.flag, each.key)))
        yield from _wrapped(f"{names} takes {each.accepts[0]} alone: {each.because}.", "  ")


def _option(item: Option) -> Iterator[str]:
    switch = f", --no-{item.flag.removeprefix('--')}" if item.is_switch else ""
    value = "" if item.is_switch else f" {item.metavar or ('CHOICE' if item.choices else 'N')}"
    yield f"  {item.flag}{value}{switch}"
    facts = [f"Default: {item.default_text}."]
    if item.bounds:
        facts.append(f"Takes {item.bounds}.")
    facts.append(f"Environment: {', '.join(item.env)}.")
    yield from _wrapped(f"{item.help} {' '.join(facts)}", "      ")


def metric_lines() -> Iterator[str]:
    """Yield the reference of all metrics, and of the columns of the scorecard."""
    from uma_trio.observe.catalogue import AT_THE_END, INTERVAL, METRICS

    yield from _wrapped(METRICS_HEAD)
    group = ""
    for metric in METRICS:
        if metric.group != group:
            group = metric.group
            yield from ("", group.upper())
        name = f"{metric.name}{{{metric.label}}}" if metric.label else metric.name
        other = "" if metric.prometheus == metric.name else f", {metric.prometheus or '-'}"
        yield from ("", f"  {name}{other}  ({', '.join(filter(None, (metric.kind, metric.unit)))})")
        yield from _wrapped(f"{metric.help} {metric.use}", "      ")
    yield from ("", "THE SCORECARD", "")
    yield from _wrapped(
        "The metric scorecard, and the columns of --scorecard: figures of one --scorecard-interval. Unknown values "
        f"are empty cells, or null. At the end of the interval: {', '.join(AT_THE_END)}.",
        "  ",
    )
    for name, text in INTERVAL:
        yield from ("", f"  {name}")
        yield from _wrapped(text, "      ")


def _wrapped(text: str, indent: str = "") -> Iterator[str]:
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    for n, paragraph in enumerate(text.split("\n\n")):
        if n:
            yield ""
        if paragraph.startswith(" "):
            yield from paragraph.splitlines()
        else:
            yield from textwrap.wrap(
                paragraph, width, initial_indent=indent, subsequent_indent=indent
            )
