"""Files of models: where they are, what they say, and what a probe process finds out about them. For helper threads."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from uma_trio.backend.base import Adapter, ModelError
from uma_trio.backend.bindings import LlamaRefused, current, want
from uma_trio.backend.kv_memory import (
    N_BATCH,
    available_memory,
    expert_bytes_by_layer,
)
from uma_trio.backend.kv_types import kv_type_name
from uma_trio.backend.needs import Estimate, Needs, Question
from uma_trio.config.adapters import adapter_spec
from uma_trio.config.errors import ConfigError
from uma_trio.config.hardware import limit_spinning, physical_cores
from uma_trio.config.options import Config
from uma_trio.library.names import stem_of
from uma_trio.library.stores import Found, NoSuchModel, model_file, models_here
from uma_trio.models import bundled_model
from uma_trio.models.fit import (
    DEVICE_MARGIN,
    UNKNOWN_ROOM,
    Memory,
    fit_context,
    layers_of_experts_off_device,
)
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.costing.store import (
    needs_file,
    recall_computing,
    recall_needs,
    remember_computing,
    remember_needs,
)
from uma_trio.policy.pipeline import Policy, PolicyError, needs_cost
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.template import MAX_SOURCE, ChatTemplate, NotRendered
from uma_trio.words import Gives, one_line, several

if TYPE_CHECKING:
    from uma_trio.backend.gguf_header import GgufHeader

_kinds: dict[Path, Gives] = {}  # by the file's path
#: Contexts whose memory is estimated besides the configured one.
_LEAST_CONTEXT, _LONGEST_CONTEXT = 256, 1 << 20
#: Tokens whose KV cache is to fit on a GPU before experts are placed there: two agents.
_CELLS_BEFORE_EXPERTS = 65_536


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


def kind_of(config: Config) -> Gives:
    """Return what a model makes of texts, by what its file says; text if the file cannot be read.

    Raises:
        ConfigError: it was named as a model that gives something else.
    """
    from uma_trio.backend.encoder import gives_by
    from uma_trio.backend.gguf_header import read_header

    wanted = config.model_gives
    try:
        path = model_path(config)
        found = _kinds[path] = gives_by(read_header(path))
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


def known_kind(config: Config) -> Gives:
    """Return what a model makes by its file as it was read last: no file is read again for this."""
    try:
        return _kinds.get(model_path(config)) or kind_of(config)
    except ModelError:
        return config.model_gives or "text"


def names_in_file(config: Config) -> tuple[str, ...]:
    """Return what a model is called by its file, whether it is loaded or not; nothing if the file cannot be read."""
    from uma_trio.backend.gguf_header import read_header

    if config.is_variant:
        return ()
    try:
        header = read_header(model_path(config))
    except ModelError:
        return ()
    named = text_names if kind_of(config) == "text" else encoder_names
    return named(header.path, header.name)


def text_names(path: Path, name: str) -> tuple[str, ...]:
    """Return what a model that writes is called by its file, which calls it `name`, and by the file's own name.

    Ollama's files and those of Hugging Face's cache are called by their hashes, without a suffix.
    """
    stem = one_line(stem_of(path.name)) if path.suffix == ".gguf" else name
    return tuple(dict.fromkeys([name, stem]))


def encoder_names(path: Path, name: str) -> tuple[str, ...]:
    """Return what an encoder is called by its file, which calls it `name`."""
    return tuple(dict.fromkeys([one_line(path.stem), name]))


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


def scratch_slots(config: Config) -> int:
    """Return how many slots are kept for ballast rows; only a policy with a cost model has any."""
    return int(needs_cost(chosen_policy(config)))


@frozen
class Fitted:
    """A configuration in which nothing is left open, a sentence on what was chosen, and the largest context that memory allows."""

    config: Config
    chosen: str = ""
    largest_n_ctx: int = 0


def fit_to_memory(
    config: Config, peers: Sequence[Config] = (), held: Sequence[Needs] = ()
) -> Fitted:
    """Choose what `config` leaves open: context, slots, and which experts stay off the GPU.

    `peers` are the other configured models of the daemon, which share the memory; `held` is what those of them have that are loaded.

    Raises:
        ModelError: the file cannot be read.
    """
    from uma_trio.backend import llama_probe
    from uma_trio.backend._llama_options import context_bytes, flash_type

    header = llama_probe.header(model_path(config))
    memory = _free_memory(config, held)
    writing = [each for each in peers if each is not config and known_kind(each) == "text"]
    sharing = writing if memory.on_device else peers  # encoders compute on the CPU
    weights = header.size_bytes + sum(_file_size(each) for each in sharing if each is not config)
    if weights > memory.free * 0.9:  # they take turns
        weights = header.size_bytes
    shares = (1 + len(writing)) * (1 + (config.lora_contexts if config.lora else 0))
    experts = expert_bytes_by_layer(header) if memory.on_device else ()
    kv_type = kv_type_name(config.kv_type)
    flash = flash_type(config.flash_attention, kv_type)
    cell = context_bytes(header, 1024, N_BATCH, kv_type, flash) / 1024
    moved = config.n_cpu_moe
    if moved is None:
        least = (
            header.size_bytes - sum(experts) + int(cell * (config.n_ctx or _CELLS_BEFORE_EXPERTS))
        )
        moved = layers_of_experts_off_device(experts, least, memory.free - DEVICE_MARGIN)
    trained = max(0, header.number("context_length"))
    weights -= sum(experts[:moved])
    fit = fit_context(memory, weights, cell, trained, config.parallel, shares)
    words = []
    if config.n_ctx is None:
        each = fit.n_ctx // fit.slots
        words.append(
            f"{several(fit.slots, 'slot')} of {each:,} tokens (--n-ctx {fit.n_ctx}): {fit.reason}"
        )
        config = evolve(config, n_ctx=fit.n_ctx, parallel=fit.slots)
    if moved and config.n_cpu_moe is None:
        words.append(f"the experts of {moved} of {len(experts)} layers stay in RAM (--n-cpu-moe)")
    config = evolve(config, parallel=config.slots, n_cpu_moe=moved)
    return Fitted(config, "; ".join(words), fit.largest)


def _uses_gpu(config: Config) -> bool:
    try:
        return bool(current().gpu) and config.gpu_layers != 0
    except LlamaRefused:
        return False


def _free_memory(config: Config, held: Sequence[Needs]) -> Memory:
    if _uses_gpu(config) and config.gpu_layers < 0:
        from uma_trio.backend import _llama_lib  # slow to import

        free = _llama_lib.free_device_memory()
        if free is not None:
            return Memory(free + sum(each.device for each in held), on_device=True)
    free = available_memory()  # mapped weights count as free: the kernel can drop them
    return Memory(UNKNOWN_ROOM if free is None else free + sum(each.private for each in held))


def _file_size(config: Config) -> int:
    """Return the bytes of all parts of a model's file, 0 if it cannot be read."""
    from uma_trio.backend import llama_probe

    try:
        return llama_probe.header(model_path(config)).size_bytes
    except ModelError:
        return 0


def estimate(config: Config, *others: int) -> Estimate:
    """Return what memory a model takes, tried in a process of its own, which takes about a second, or as was found before.

    Its curve has the smallest context, that of `config`, the longest that the model was trained for, and `others`.
    Raises :class:`ModelError` if it cannot be loaded.
    """
    from uma_trio.backend import llama_probe

    path = model_path(config)
    config = _fitted(config)
    question, kept = _asked(config, path, others)
    found = None if kept is None else recall_needs(kept)
    if found is None:
        found = evolve(llama_probe.estimate(path, question), slots=config.slots)
        if kept is not None and _asked(config, path, others)[1] == kept:  # it was not replaced
            remember_needs(kept, found)
    return found


def variant_estimate(config: Config) -> Estimate:
    """Return what memory a further context of a loaded model takes. Raises :class:`ModelError`."""
    whole = estimate(config)
    return Estimate(_without_weights(whole.needs))


def _without_weights(needs: Needs) -> Needs:
    return evolve(needs, own=0, mapped=0, other=0)


def try_computing(config: Config) -> None:
    """Compute two tokens of a model in a process of its own, unless that was done with this file before.

    Raises :class:`ModelError` if llama.cpp cannot.
    """
    from uma_trio.backend import llama_probe

    path, config = model_path(config), _fitted(config)
    question, kept = _asked(config, path, ())
    if kept is not None and recall_computing(kept):
        return
    llama_probe.try_computing(path, question)
    if kept is not None and _asked(config, path, ())[1] == kept:
        remember_computing(kept)


def _fitted(config: Config) -> Config:
    """Return the settings as they would be chosen now; an encoder has its own context."""
    is_fixed = config.n_ctx is not None and (config.n_cpu_moe is not None or not _uses_gpu(config))
    if is_fixed or kind_of(config) != "text":
        return config
    return fit_to_memory(config).config


def _asked(
    config: Config, path: Path, others: Sequence[int]
) -> tuple[Question | None, Path | None]:
    """Return what a probe is asked of a model, and where its answer is kept; None: in memory. An encoder has no question."""
    from uma_trio.backend import llama_probe
    from uma_trio.backend._llama_options import library_of_needs

    header = llama_probe.header(path)
    question = _question(config, header, others) if kind_of(config) == "text" else None
    build = library_of_needs(-1 if question is None else question.gpu_layers)
    try:
        return question, needs_file(header.parts, question, build) if build else None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error


def _question(config: Config, header: GgufHeader, others: Sequence[int]) -> Question:
    """Return how a model that writes is going to be loaded."""
    from uma_trio.backend._llama_options import checked

    slots, threads = config.slots + scratch_slots(config), config.threads or physical_cores()
    kv_type = checked(
        header, n_ctx=config.cells, n_slots=slots, threads=threads, kv_type=config.kv_type
    )
    longest = min(header.number("context_length"), _LONGEST_CONTEXT)
    return Question(
        n_ctx=config.cells,
        n_slots=slots,
        kv_type=kv_type,
        flash_attention=config.flash_attention,
        gpu_layers=config.gpu_layers,
        n_cpu_moe=config.n_cpu_moe or 0,
        mmap=config.mmap,
        others=tuple(n for n in (_LEAST_CONTEXT, longest, *others) if n > 0),
    )


def may_be_too_large(config: Config) -> bool:
    """Whether file and context, by the header alone, are more than half of the memory that is free."""
    from uma_trio.backend._llama_options import FLASH_ON, checked, context_bytes
    from uma_trio.backend.gguf_header import read_header

    room, header = available_memory(), read_header(model_path(config))
    kv_type = checked(header, n_ctx=config.cells, n_slots=1, threads=1, kv_type=config.kv_type)
    context = context_bytes(header, config.cells, N_BATCH, kv_type, FLASH_ON)
    return room is not None and header.size_bytes + context > room // 2


def refuse_without_room(config: Config, *, beside_another: bool) -> None:
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


def import_backend(config: Config) -> None:
    """Import llama.cpp, which takes a while; tests with a backend of their own do without."""
    limit_spinning()
    want(config.llama)
    import uma_trio.backend.llama  # noqa: F401
