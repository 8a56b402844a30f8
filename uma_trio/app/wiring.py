"""The parts of the daemon, each made from the options: what :mod:`uma_trio.app.daemon` puts together.

Whatever translates between two parts' words stands here, so that none of them knows the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from attrs import evolve

from uma_trio import __version__
from uma_trio.backend.base import Adapter, Backend, ModelError, ModelFacts
from uma_trio.backend.bindings import want
from uma_trio.backend.kv_memory import N_BATCH, available_memory
from uma_trio.backend.needs import Estimate, Needs, Question
from uma_trio.config.adapters import adapter_spec
from uma_trio.config.errors import ConfigError
from uma_trio.config.hardware import limit_spinning, physical_cores, total_memory
from uma_trio.config.options import Config
from uma_trio.engine.cells import PrefixDisk
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.library.stores import Found, NoSuchModel, model_file, models_here
from uma_trio.models import bundled_model
from uma_trio.observe import log
from uma_trio.observe.catalogue import COLUMNS
from uma_trio.observe.table_file import AnotherTable, TableFile
from uma_trio.observe.trace import TraceFile
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.cost import CostModel, Traffic, Work
from uma_trio.policy.costing.calibrate import Neighbour, assume_looking_back, measured_cost
from uma_trio.policy.costing.copying import known_copies
from uma_trio.policy.costing.neighbours import in_words
from uma_trio.policy.costing.store import (
    cache_folder,
    needs_file,
    recall_computing,
    recall_needs,
    remember_computing,
    remember_needs,
)
from uma_trio.policy.pipeline import Policy, PolicyError, needs_cost
from uma_trio.policy.portable import Header
from uma_trio.policy.state import Contract
from uma_trio.policy.tuning import TUNING
from uma_trio.service.checks import Bounds
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.replies import ReplyFormat
from uma_trio.text.replies.format import format_from
from uma_trio.text.template import MAX_SOURCE, ChatTemplate, NotRendered
from uma_trio.uds.settings import Settings
from uma_trio.words import BY_BACKEND, Gives, one_line

if TYPE_CHECKING:
    from uma_trio.backend.gguf_header import GgufHeader

Progress = Callable[[float], None]

_gives: dict[Path, Gives] = {}  # what files were found to give
# By default, where models compute in the same memory, and where they compute on a GPU: there a conversation of 30,000
# tokens is 4 GB (8B, f16), and the memory of the host has little else to do.
_MOST_PREFIX_BYTES, _MOST_BESIDE_GPU = 2 << 30, 16 << 30
_LEAST_CONTEXT, _LONGEST_CONTEXT = 256, 1 << 20  # of which needs are told


def import_backend(config: Config) -> None:
    """Import llama.cpp, which takes a while; tests with a backend of their own do without."""
    limit_spinning()
    want(config.llama)
    import uma_trio.backend.llama  # noqa: F401


def load_backend(
    config: Config,
    on_progress: Progress | None,
    *,
    beside_another: bool = False,
    polite: bool = False,
    several: bool = False,
) -> Backend:
    """Load the model. Raises :class:`ModelError`; takes as long as the disk does.

    `beside_another`: a daemon with the model serves until this one takes its place. Its needs are summed up before: also
    if they may be more than what is free. With `polite` reading yields the cores to other models' readers.
    `several`: other models may be loaded beside it.
    """
    import_backend(config)
    if beside_another or _may_be_too_large(config):
        _refuse_without_room(config, beside_another=beside_another)
    from uma_trio.backend.llama import LlamaBackend  # takes a while, and tests do without

    report = log.get("llama.cpp")
    return LlamaBackend.load(
        model_path(config),
        n_ctx=config.n_ctx,
        n_slots=config.parallel,
        scratch_slots=_scratch_slots(config),
        threads=config.threads or physical_cores(),
        kv_type=config.kv_type,
        kv_layout=config.kv_layout,
        flash_attention=config.flash_attention,
        mlock=config.mlock,
        mmap=config.mmap,
        gpu_layers=config.gpu_layers,
        progress=on_progress,
        log=lambda level, text: getattr(report, level)(text),
        parts=several,
        polite=polite,
    )


def gives_of(config: Config) -> Gives:
    """Return what a model makes of texts, by what its file says; text if the file cannot be read.

    Raises:
        ConfigError: it was named as a model that gives something else.
    """
    from uma_trio.backend.encoder import gives_by
    from uma_trio.backend.gguf_header import read_header

    wanted = config.model_gives
    try:
        path = model_path(config)
        found = _gives[path] = gives_by(read_header(path))
    except ModelError:
        return wanted or "text"
    if wanted is None or found == wanted:
        return found
    option = "embedding_model" if wanted == "vectors" else "rerank_model"
    does, flag = {
        "text": ("writes text", "--model"),
        "vectors": ("makes vectors", "--embedding-model"),
        "scores": ("ranks", "--rerank-model"),
    }[found]
    raise ConfigError(f"{config.source(option)} {config.model}: this model {does}; use {flag}")


def names_in_file(config: Config) -> tuple[str, ...]:
    """Return what a model is called by its file, whether it is loaded or not; nothing if the file cannot be read."""
    from uma_trio.backend.gguf_header import read_header

    if config.is_variant:
        return ()
    try:
        header = read_header(model_path(config))
    except ModelError:
        return ()
    return (header.name,) if gives_of(config) == "text" else encoder_names(header.path, header.name)


def encoder_names(path: Path, name: str) -> tuple[str, ...]:
    """Return what an encoder is called by its file, which calls it `name`."""
    return tuple(dict.fromkeys([one_line(path.stem), name]))


def estimate(config: Config, *others: int) -> Estimate:
    """Return what memory a model takes, tried in a process of its own, which takes about a second, or as was found before.

    Its curve has the smallest context, that of `config`, the longest that the model was trained for, and `others`.
    Raises :class:`ModelError` if it cannot be loaded.
    """
    from uma_trio.backend import llama_probe

    path = model_path(config)
    question, kept = _asked(config, path, others)
    found = None if kept is None else recall_needs(kept)
    if found is None:
        found = llama_probe.estimate(path, question)
        if kept is not None and _asked(config, path, others)[1] == kept:  # it was not replaced
            remember_needs(kept, found)
    return found


def try_computing(config: Config) -> None:
    """Compute two tokens of a model in a process of its own, unless that was done with this file before.

    Raises :class:`ModelError` if llama.cpp cannot.
    """
    from uma_trio.backend import llama_probe

    path = model_path(config)
    question, kept = _asked(config, path, ())
    if kept is not None and recall_computing(kept):
        return
    llama_probe.try_computing(path, question)
    if kept is not None and _asked(config, path, ())[1] == kept:
        remember_computing(kept)


def _asked(
    config: Config, path: Path, others: Sequence[int]
) -> tuple[Question | None, Path | None]:
    """Return what a probe is asked of a model, and where its answer is kept; None: in memory. An encoder has no question."""
    from uma_trio.backend import llama_probe
    from uma_trio.backend._llama_options import library_of_needs

    header = llama_probe.header(path)
    question = _question(config, header, others) if gives_of(config) == "text" else None
    build = library_of_needs(-1 if question is None else question.gpu_layers)
    try:
        return question, needs_file(header.parts, question, build) if build else None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error


def _question(config: Config, header: GgufHeader, others: Sequence[int]) -> Question:
    """Return how a model that writes is going to be loaded."""
    from uma_trio.backend._llama_options import checked

    slots, threads = config.parallel + _scratch_slots(config), config.threads or physical_cores()
    kv_type = checked(
        header, n_ctx=config.n_ctx, n_slots=slots, threads=threads, kv_type=config.kv_type
    )
    longest = min(header.number("context_length"), _LONGEST_CONTEXT)
    return Question(
        n_ctx=config.n_ctx,
        n_slots=slots,
        kv_type=kv_type,
        flash_attention=config.flash_attention,
        gpu_layers=config.gpu_layers,
        mmap=config.mmap,
        others=tuple(n for n in (_LEAST_CONTEXT, longest, *others) if n > 0),
    )


def _may_be_too_large(config: Config) -> bool:
    """Whether file and context, by the header alone, are more than half of the memory that is free."""
    from uma_trio.backend._llama_options import FLASH_ON, checked, context_bytes
    from uma_trio.backend.gguf_header import read_header

    room, header = available_memory(), read_header(model_path(config))
    kv_type = checked(header, n_ctx=config.n_ctx, n_slots=1, threads=1, kv_type=config.kv_type)
    context = context_bytes(header, config.n_ctx, N_BATCH, kv_type, FLASH_ON)
    return room is not None and header.size_bytes + context > room // 2


def _refuse_without_room(config: Config, *, beside_another: bool) -> None:
    """Refuse what the kernel would end us for. Mapped weights may be larger: the disk is slow then.

    Raises:
        ModelError: it has the sum, and what to do.
    """
    needed, room = estimate(config), available_memory()
    if room is None:
        return
    if beside_another:
        needed.refuse_beside(room)
    elif needed.needs.private > room:
        raise ModelError(f"{model_path(config)} does not fit: {needed.refusal(room)}.")


def variant_estimate(config: Config) -> Estimate:
    """Return what memory a further context of a loaded model takes. Raises :class:`ModelError`."""
    whole = estimate(config)
    return Estimate(_without_weights(whole.needs))


def _without_weights(needs: Needs) -> Needs:
    return evolve(needs, own=0, mapped=0, other=0)


def adapters_of(config: Config) -> tuple[Adapter, ...]:
    """Return the adapters that a model has, with the scales that they have where a request says none."""
    return tuple(Adapter(*adapter_spec(text)) for text in config.lora)


def check_adapters(config: Config) -> None:
    """Refuse files that are no adapters for the model. Raises :class:`ModelError`."""
    from uma_trio.backend.gguf_header import read_header

    if not config.lora:
        return
    wanted = read_header(model_path(config)).architecture
    for adapter in adapters_of(config):
        header = read_header(adapter.path)
        if header.metadata.get("general.type") != "adapter":
            raise ModelError(f"{adapter.path} is no LoRA adapter; name one that is (--lora).")
        if header.architecture != wanted:
            raise ModelError(
                f"{adapter.path} is an adapter for {header.architecture}, and the model is {wanted}."
            )


def try_adapters(config: Config, adapters: Sequence[Adapter]) -> None:
    """Try adapters with their model in a process of its own. Raises :class:`ModelError` if one cannot be used."""
    from uma_trio.backend.llama_probe import probe_adapter

    for adapter in adapters:
        probe_adapter(model_path(config), adapter.path)


def chosen_policy(config: Config) -> Policy:
    """Return the policy that is named. Raises :class:`ConfigError`."""
    try:
        return find_policy(config.policy)
    except PolicyError as error:
        raise ConfigError(f"{config.source('policy')} {config.policy}: {error}") from error


def _scratch_slots(config: Config) -> int:
    """Return how many slots are kept for ballast rows; only a policy with a cost model has any."""
    return int(needs_cost(chosen_policy(config)))


def engine_settings(
    config: Config,
    backend: Backend,
    on_measuring: Progress | None = None,
    beside: Neighbour | None = None,
) -> EngineSettings:
    """Put the options into the engine's words, and measure the machine for policies that ask, unless `beside` another model.

    Called before the engine's thread exists, which owns the backend from then on.
    """
    contract = Contract(
        latency_cap=config.latency_cap,
        reading_pace_s=config.reading_pace / 1e3,
        pause_cap=config.pause_cap,
        playout_s=config.playout_ms / 1e3,
        background_floor=config.background_floor,
        newcomer_tokens=config.interactive_prompt,
        interactive_weight=config.interactive_priority,
    )
    plain = EngineSettings(
        tick_budget_s=config.tick_budget_ms / 1e3,
        contract=contract,
        prefix_bytes=prefix_bytes(config, on_gpu=backend.traits.shape_costs),
        session_ttl_s=config.session_ttl_s,
    )
    if not _scratch_slots(config):
        return plain
    cost = _cost(backend, on_measuring, beside)
    traffic = _traffic(backend.model)
    probed = traffic.bandwidth({n: cost.seconds(Work(n)) for n in cost.sizes})
    if probed:
        cell_s = traffic.cell_bytes / probed
        cost = assume_looking_back(cost, cell_s, whole_cache=backend.limits.whole_cache)
    given = None if config.bmt_budget is None else config.bmt_budget * 1e9
    speculation = allowed_speculation(config, backend)
    if speculation != "off" and cost.recapture_s:
        speculation = "off"
        log.get("cost").warning(
            f"--speculation {config.speculation} drafts nothing here: graphs are captured, and a change "
            "of the batch's shape costs more than guesses give"
        )
    return evolve(
        plain,
        contract=evolve(
            contract,
            bmt_budget=given or probed or None,
            paid_drafts=speculation == "auto",
        ),
        scratch_slots=int(backend.limits.n_streams == 1),
        drafts=speculation != "off",
        cost=cost,
        traffic=traffic,
        copying=known_copies(backend, perf_counter) if plain.prefix_bytes else None,
    )


def _cost(backend: Backend, on_measuring: Progress | None, beside: Neighbour | None) -> CostModel:
    measured = measured_cost(backend, beside=beside, on_progress=on_measuring)
    cost = measured.cost
    if measured.unusable:
        log.get("cost").warning(
            "the stored cost table cannot be used and is measured again",
            file=str(measured.file),
            why=measured.unusable,
        )
    if cost.others and beside is None:
        log.get("cost").warning(in_words(cost.others))
    return cost


def allowed_speculation(config: Config, backend: Backend) -> str:
    """Return how far guesses may go; if the user does not say, by where it computes."""
    if config.speculation != BY_BACKEND:
        return config.speculation
    return "off" if backend.traits.shape_costs else "auto"


def prefix_bytes(config: Config, *, on_gpu: bool = False) -> int:
    """Return how much saved prompts of a model may take: what was asked for, or its part of a tenth of the memory."""
    if config.prefix_ram is not None:
        return config.prefix_ram
    writers = sum(_was_given(each) == "text" for each in config.each())
    most = _MOST_BESIDE_GPU if on_gpu else _MOST_PREFIX_BYTES
    return min(total_memory() // 10, most) // max(1, writers)


def _was_given(config: Config) -> Gives:
    """Return what a model makes by its file as it was read last: no file is read again for this."""
    try:
        return _gives.get(model_path(config)) or gives_of(config)
    except ModelError:
        return config.model_gives or "text"


def open_prefix_disk(config: Config, credentials: Mapping[str, bytes]) -> PrefixDisk | None:
    """Open the files of saved prefixes, if there are to be any and that is possible. Blocks on the disk."""
    folder = cache_folder("prefix")
    if not config.prefix_disk:
        return None
    try:
        return PrefixDisk(folder, config.prefix_disk, credentials)
    except OSError as error:
        why = error.strerror or str(error)
        log.get("prefix").warning(
            "no prefixes on disk (--prefix-disk)", folder=str(folder), why=why
        )
        return None


def _traffic(model: ModelFacts) -> Traffic:
    return Traffic(
        weight_bytes=model.weight_bytes,
        cell_bytes=model.cell_bytes,
        expert_bytes=model.expert_bytes,
        experts=model.experts,
        experts_used=model.experts_used,
    )


def nth_trace(path: Path, n: int) -> Path:
    """Return the file for the trace of a model that is loaded for the `n`-th time: each loading has a trace of its own."""
    return path if n < 2 else path.with_name(f"{path.stem}-{n}{path.suffix}")


@contextmanager
def recorder(config: Config, backend: Backend, settings: EngineSettings) -> Iterator[Recorder]:
    """Give the engine its memory, and a trace if one is wanted; the trace ends with the block."""
    if config.trace is None:
        yield Recorder()
        return
    header = Header(
        __version__,
        backend.model.name,
        config.policy,
        settings.contract,
        slots=backend.limits.n_slots,
        tuning=TUNING if settings.cost is None else settings.cost.tuning,
    )
    try:
        trace = TraceFile(config.trace, header)
    except OSError as error:
        raise unwritable(config, "trace", error.strerror or str(error)) from error
    with closing(trace):
        yield Recorder(trace)


@contextmanager
def scorecard_file(config: Config) -> Iterator[TableFile | None]:
    """Open the table that the scorecard's lines go to, if one is wanted, until the block ends."""
    if config.scorecard is None:
        yield None
        return
    try:
        file = TableFile(config.scorecard, COLUMNS)
    except OSError as error:
        raise unwritable(config, "scorecard", error.strerror or str(error)) from error
    except AnotherTable as error:
        message = f"{config.source('scorecard')} {config.scorecard}: {error}; name another file"
        raise ConfigError(message) from error
    with closing(file):
        yield file


def unwritable(config: Config, name: str, why: str) -> ConfigError:
    """Return what to raise where the file that the setting `name` names cannot be written."""
    file = f"{config.source(name)} {getattr(config, name)}"
    return ConfigError(f"{file}: {why}; name a file that can be written")


def model_path(config: Config) -> Path:
    """Return the file of the model to serve: the one that is named, or the bundled one.

    Raises :class:`ModelError` if neither is there.
    """
    if config.model is not None:
        return named_model(config, config.model)
    try:
        return bundled_model()
    except FileNotFoundError as missing:
        raise ModelError(f"{missing}; name a model with --model.") from None


def found_models(config: Config) -> list[Found]:
    """Return the models on this machine that may be named, the bundled one last."""
    try:
        bundled = bundled_model()
    except FileNotFoundError:
        bundled = None
    return models_here(config.model_dir, os.environ, Path.home(), bundled)


def named_model(config: Config, asked: Path) -> Path:
    """Return the file of a model that was asked for by its path or its name. Raises :class:`ModelError`."""
    try:
        return model_file(str(asked), partial(found_models, config))
    except NoSuchModel as error:
        raise ModelError(str(error)) from None


def reply_format(config: Config) -> ReplyFormat | None:
    """Return the format of replies that is given. Raises :class:`ConfigError`."""
    path = config.reply_format
    if path is None:
        return None
    try:
        return format_from(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{config.source('reply_format')} {path}: {why}") from error


def chat_template(config: Config) -> str | None:
    """Return the template that is given instead of the model's. Raises :class:`ConfigError`."""
    path = config.chat_template_file
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_SOURCE + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise _bad_template(config, why) from error


def check_template(config: Config) -> None:
    """Compile the template that is given instead of the model's, and render a first chat. Blocks.

    Raises:
        ConfigError: it cannot be used.
    """
    source = chat_template(config)
    try:
        if source is not None:
            ChatTemplate(source).check()
    except NotRendered:
        return  # the daemon tries it again
    except Unrenderable as error:
        raise _bad_template(config, error) from error


def _bad_template(config: Config, why: object) -> ConfigError:
    return ConfigError(f"{config.source('chat_template_file')} {config.chat_template_file}: {why}")


def model_info(config: Config, backend: Backend) -> ModelFacts:
    """Return what is loaded, with the template that it is used with. Raises :class:`ConfigError`."""
    given = chat_template(config)
    return backend.model if given is None else evolve(backend.model, chat_template=given)


def configured_names(config: Config) -> tuple[str, ...]:
    """Return what the operator calls a model: its names, or else what it was asked for by, if that is no file."""
    asked = str(config.model) if config.model is not None else ""
    by_name = asked and not asked.endswith(".gguf") and not Path(asked).exists()
    return config.alias or ((asked,) if by_name else ())


def file_names(config: Config, files: Sequence[str], reserved: Container[str]) -> tuple[str, ...]:
    """Return what a model's files call it besides, without the `reserved` names, which other models have.

    A model without any name is called as its file in the file system.
    """
    given = configured_names(config)
    found = tuple(n for n in dict.fromkeys(files) if n not in given and n not in reserved)
    return found or (() if given else (one_line(model_path(config).name),))


def bounds(config: Config, backend: Backend, reserved: Container[str] = ()) -> Bounds:
    """Put the options into the words of the service."""
    # That of the file is the name of the model without adapters.
    files = () if config.is_variant else (backend.model.name,)
    limits, n_vocab = backend.limits, backend.model.n_vocab
    found = bounds_of(config, file_names(config, files, reserved), limits.n_ctx_seq, n_vocab)
    return evolve(found, longer=_longer(backend))


def _longer(backend: Backend) -> str:
    """Return how requests can be longer, for the refusal of one that is too long."""
    limits, trained = backend.limits, backend.model.n_ctx_train
    if 0 < trained <= limits.n_ctx_seq:
        return "The model was trained for no more"
    if limits.n_streams > 1:
        return (
            f"The daemon has --n-ctx {limits.n_ctx} for --parallel {limits.n_slots}: a larger --n-ctx, fewer slots, "
            "or --kv-layout unified make more room for one request"
        )
    return f"A larger --n-ctx of the daemon (now {limits.n_ctx}) makes room"


def bounds_of(config: Config, from_file: tuple[str, ...], n_ctx_seq: int, n_vocab: int) -> Bounds:
    """Put the options into the words of the service, for a model that is called so by its file, too."""
    names = (*configured_names(config), *from_file)
    return Bounds(
        model=names[0],
        aliases=names[1:],
        from_file=from_file,
        n_ctx_seq=n_ctx_seq,
        n_vocab=n_vocab,
        max_tokens=config.max_tokens,
        max_tokens_cap=config.max_tokens_cap,
    )


def net_settings(config: Config) -> Settings:
    """Put the options into the words of the socket side."""
    return Settings(
        max_prompt_bytes=config.max_prompt_bytes,
        max_sessions=config.max_sessions,
        idle_timeout_s=config.idle_timeout_s,
    )
