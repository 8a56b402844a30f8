"""`uma-trio doctor`: what keeps the daemon from running, or from running fast, and how to fix it."""

from __future__ import annotations

import json as jsonlib
import os
import platform
import resource
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import attrs
from attrs import field, frozen

from uma_trio import __version__
from uma_trio.cli.attempt import accepts, answer_of
from uma_trio.cli.output import (
    OK,
    USAGE,
    JsonFlag,
    complain,
    console,
    how_to_ask,
    print_json,
    program,
    say,
)
from uma_trio.cli.parser import Parameter
from uma_trio.config import settings
from uma_trio.config.errors import ConfigError
from uma_trio.config.hardware import cpu_features, cpu_quota, files_needed, physical_cores
from uma_trio.config.options import Config
from uma_trio.sockets.address import FRAMED_TCP, Address, parse_framed
from uma_trio.words import size

if TYPE_CHECKING:
    from uma_trio.client import Client

Weight = Literal["slow", "blocks"]

#: The kernel's names of processor features, and llama.cpp's.
_FEATURES: Final = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx_vnni": "AVX_VNNI", "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8", "sve": "SVE",
}  # fmt: skip
#: Device files of GPU drivers, and the option that compiles llama.cpp for them.
_GPU_FILES: Final = {"dev/nvidiactl": "-DGGML_CUDA=on", "dev/kfd": "-DGGML_HIP=on"}
_REBUILD: Final = "rm -r .venv ~/.cache/uma-trio/wheels && make setup"
_PROBE: Final = (
    "import attrs, json, sys\n"
    "from uma_trio.backend.llama import system_info\n"
    "json.dump(attrs.asdict(system_info()), sys.stdout, default=dict)"
)
#: Share of all prompt tokens from which more memory for prefixes is recommended.
_WORTH_SAYING: Final = 0.05
#: Milliseconds of event loop lag that a reader may notice.
_LATE_MS: Final = 5.0
_INDENT: Final = " " * 8
_LEAST_WIDTH: Final = 20


@frozen
class Finding:
    """A problem. `fix` is empty if `what` says what to do."""

    about: str
    weight: Weight
    what: str
    fix: str = ""


Findings = Iterator[Finding]


def doctor(
    checked: Annotated[
        str | None, Parameter(help="The model to check, as by --model.", metavar="MODEL")
    ] = None,
    /,
    *,
    model: Annotated[
        str | None, Parameter(help="The model to check: a file or a name.", metavar="MODEL")
    ] = None,
    socket: Annotated[
        str | None, Parameter(help="The socket to check. Environment: UMA_SOCKET.", metavar="PATH")
    ] = None,
    n_ctx: Annotated[str | None, Parameter(help="The context size to assume.", metavar="N")] = None,
    parallel: Annotated[
        str | None, Parameter(help="The number of slots to assume.", metavar="N")
    ] = None,
    http: Annotated[
        str | None, Parameter(help="The HTTP address to check.", metavar="[HOST:]PORT")
    ] = None,
    config: Annotated[
        str | None, Parameter(help="A YAML file with settings.", metavar="FILE")
    ] = None,
    cost: Annotated[
        bool,
        Parameter(
            help="Only print the time of a tick by its number of tokens here. Loads the model."
        ),
    ] = False,
    fresh: Annotated[
        bool, Parameter(help="With --cost: measure again instead of using the stored times.")
    ] = False,
    template: Annotated[
        str | None,
        Parameter(
            help="Only print how the model writes tool calls and reasoning, from its chat template: a "
            "GGUF file or a template file.",
            metavar="FILE",
        ),
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Find problems that would stop or slow the daemon, and print their fixes.

    The settings of a running daemon are checked, or those given here. Exit status: 0 if the daemon can run, 1
    if a problem prevents it.
    """
    flags = {
        "model": model or checked,
        "socket": socket,
        "n_ctx": n_ctx,
        "parallel": parallel,
        "http": http,
        "config": config,
    }
    if cost:
        from uma_trio.cli.cost import show_cost

        return show_cost(settings.load(flags), fresh=fresh, as_json=json)
    if template is not None:
        from uma_trio.cli.template import show_template

        return show_template(Path(template), as_json=json)
    if fresh:
        complain("--fresh needs --cost.")
        return USAGE
    report = examine(flags)
    if json:
        print_json(attrs.asdict(report))
    else:
        _show(report, flags)
    return USAGE if any(finding.weight == "blocks" for finding in report.findings) else OK


@frozen
class SelfReport:
    """What a running daemon reports: its metrics, and the settings it was given."""

    metrics: Mapping[str, Any] = field(factory=dict)
    settings: Mapping[str, str] | None = None


@frozen
class Report:
    """What was examined, and the problems."""

    system: tuple[str, ...]
    is_running: bool
    findings: tuple[Finding, ...]


def examine(flags: Mapping[str, str | None]) -> Report:
    """Run every check."""
    findings: list[Finding] = []
    try:
        config = settings.load(flags)
    except ConfigError as error:
        findings.append(Finding("settings", "blocks", str(error)))
        config = Config()
    about: list[str] = []
    running = ask(config.socket)
    is_assumed = any(value is not None for name, value in flags.items() if name != "socket")
    is_loaded = running.settings is not None and not is_assumed
    if running.settings is not None and is_loaded:
        config = settings.load({**running.settings, "socket": str(config.socket)}, env={})
        given = shlex.join(f"--{k.replace('_', '-')}={v}" for k, v in running.settings.items())
        about = [f"settings of the running daemon: {given or 'its defaults'}"]
    llama, served = probe_llama(config.llama), config.each()
    names = [f" of {name_of(each)}" if len(served) > 1 else "" for each in served]
    findings += [*check_llama(llama), *check_policy(config)]
    sound = []
    for each, name in zip(served, names, strict=True):
        found = [*check_model(each, llama.devices)]
        findings += [attrs.evolve(one, about=one.about + name) for one in found]
        if all(one.weight != "blocks" for one in found):
            sound.append((each, name))
    if not is_loaded:
        findings += check_memory(served)
    if not llama.status:
        findings += chain.from_iterable(check_computing(each, name) for each, name in sound)
    findings += [
        *check_socket(config.socket),
        *check_running(running.metrics),
        *check_http(config),
        *check_limits(config),
        *check_structured_output(),
    ]
    system = (
        f"uma-trio {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"llama.cpp: {llama.about}",
        *about,
    )
    return Report(system, running.settings is not None, tuple(findings))


# --- llama.cpp ---


@frozen
class Probe:
    """What llama.cpp reports about itself; `info` is empty if it cannot be loaded."""

    status: int
    info: Mapping[str, Any]
    stderr: str = ""

    @property
    def devices(self) -> list[str]:
        """The names of the devices that layers can be offloaded to."""
        devices = self.info.get("devices", ())
        return [each["description"] or each["name"] for each in devices if "gpu" in each["kind"]]

    @property
    def about(self) -> str:
        """The build, and where it computes."""
        if self.status:
            return "cannot be loaded"
        info = self.info
        return f"{info['build']}, ggml {info['ggml_version']}; computes on {', '.join(self.devices) or 'the CPU'}"


def probe_llama(wanted: str) -> Probe:
    """Ask the build of llama.cpp that --llama `wanted` names what it was compiled for."""
    env = {**os.environ, "UMA_LLAMA": wanted}
    # In a process of its own: a library that was compiled for another processor ends with SIGILL.
    command = [sys.executable, "-c", _PROBE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603
    info = {} if done.returncode else jsonlib.loads(done.stdout)
    return Probe(done.returncode, info, done.stderr)


def check_llama(probe: Probe) -> Findings:
    """Compare what llama.cpp was compiled for with this processor."""
    from uma_trio.backend.bindings import PACKAGED

    if probe.status:
        yield _cannot_load(probe.status, probe.stderr)
        return
    info = probe.info
    if info["gpu_offload"] and not probe.devices:
        fix = "check the driver (nvidia-smi, vulkaninfo, rocminfo); without a GPU the CPU is used"
        yield Finding("llama.cpp", "slow", "compiled for a GPU, but no GPU is found", fix)
    if not info["gpu_offload"] and (flag := flag_for_gpu()):
        what = "compiled for the CPU only, but this machine has a GPU's device file"
        fix = f"install a build for it, or export CMAKE_ARGS={flag} && make setup"
        yield Finding("llama.cpp", "slow", what, fix)
    is_packaged = info["module"] == PACKAGED
    yield from compare_features(
        info["features"].get("CPU", {}), cpu_features(), packaged=is_packaged
    )


def flag_for_gpu(root: Path = Path("/")) -> str | None:
    """Return what llama.cpp would be compiled with for a GPU whose driver is installed."""
    return next((flag for name, flag in _GPU_FILES.items() if (root / name).exists()), None)


def compare_features(
    compiled: Mapping[str, str], present: frozenset[str], *, packaged: bool = False
) -> Findings:
    """Report what the processor has and the library does not use.

    A `packaged` library has a variant for each common processor, and has chosen the best one.
    """
    used = [name for name, value in compiled.items() if value == "1"]
    unused = [ours for kernel, ours in _FEATURES.items() if kernel in present and ours not in used]
    if compiled.get("AMX_INT8") == "miscompiled":
        what = "compiled with a GCC that miscompiles AMX, so AMX and repacking are disabled"
        fix = "use GCC 12.4, 13.3, 14 or clang, or build without AMX as `make setup` does"
        yield Finding("CPU features", "slow", what, fix)
    if unused and not packaged:
        fix = f"unset SOURCE_DATE_EPOCH and GGML_NATIVE=OFF in CMAKE_ARGS, then {_REBUILD}"
        yield Finding("CPU features", "slow", f"not used by this build: {' '.join(unused)}", fix)


def _cannot_load(status: int, stderr: str) -> Finding:
    if status == -signal.SIGILL:
        what = "llama.cpp was compiled for another processor and cannot run on this one"
        return Finding("llama.cpp", "blocks", what, _REBUILD)
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    if "LlamaRefused: " in last:  # a sentence with a fix
        return Finding("llama.cpp", "blocks", last.partition("LlamaRefused: ")[2])
    return Finding("llama.cpp", "blocks", f"cannot be loaded (status {status}): {last}", _REBUILD)


# --- settings, models, memory ---


def check_policy(config: Config) -> Findings:
    """See whether the policy exists and can do without the stages that are left out."""
    from uma_trio.models.files import chosen_policy

    try:
        chosen_policy(config)
    except ConfigError as error:
        yield Finding("policy", "blocks", str(error))


def check_model(config: Config, devices: Sequence[str] = ()) -> Findings:
    """See whether the model's file is usable, and whether its layers are where they are fast."""
    from uma_trio.backend._llama_options import Placement
    from uma_trio.backend.base import ModelError
    from uma_trio.backend.gguf_header import read_header
    from uma_trio.models.files import kind_of, model_path

    try:
        header = read_header(model_path(config))
        if kind_of(config) != "text":
            return  # computed on the CPU
        placement = Placement.of(header.number("block_count"), devices, config.gpu_layers)
    except (ConfigError, ModelError) as error:
        yield Finding("model", "blocks", str(error))
        return
    layers, asked = placement.layers, config.gpu_layers
    if placement.on_gpu and placement.offloaded < layers:
        what = (
            f"{placement.offloaded} of {layers} on {placement.devices}; the CPU computes the rest"
        )
        fix = "omit --gpu-layers if all layers fit; otherwise use a smaller model or --n-ctx"
        yield Finding("layers", "slow", what, fix)
    elif devices and not placement.on_gpu:
        what = f"all {layers} on the CPU because of --gpu-layers 0; available: {', '.join(devices)}"
        yield Finding("layers", "slow", what, "omit --gpu-layers")
    elif asked > 0 and not devices:
        what = f"all {layers} on the CPU: --gpu-layers {asked}, and llama.cpp finds no GPU"
        yield Finding("layers", "slow", what, "build llama.cpp for the GPU")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if config.mlock and soft != resource.RLIM_INFINITY and soft < header.size_bytes:
        what = (
            f"--mlock needs {size(header.size_bytes)} of locked memory, the limit is {size(soft)}"
        )
        yield Finding("mlock", "slow", what, "ulimit -l unlimited, or omit --mlock")


def name_of(config: Config) -> str:
    """Return what a model is called if there are several."""
    if config.alias:
        return config.alias[0]
    return "the bundled model" if config.model is None else config.model.stem


def check_memory(configs: Sequence[Config]) -> Findings:
    """See whether each model fits, and whether those that are loaded at the start fit together."""
    from uma_trio.backend.base import ModelError
    from uma_trio.backend.kv_memory import available_memory
    from uma_trio.models.files import estimate

    room, together = available_memory(), 0
    for config in configs:
        about = "memory" if len(configs) == 1 else f"memory of {name_of(config)}"
        try:
            needed = estimate(config)
        except (ConfigError, ModelError) as error:
            yield Finding(about, "blocks", str(error))
            continue
        if config is configs[0] or config.load == "start":
            together += needed.needs.private
        if room is None or needed.needs.total <= room:
            continue
        need, most = needed.needs, needed.largest_context(room)
        what = (
            f"{size(need.total)} needed: {size(need.own + need.mapped)} of weights, {size(need.kv)} of KV cache, "
            f"{size(need.compute)} to compute with; only {size(room)} available"
        )
        fits = f"--n-ctx {most}" if most else "a smaller quantisation"
        fix = f"use {fits}, --kv-type q8_0 or a smaller model, or close other programs"
        yield Finding(about, "blocks" if needed.needs.private > room else "slow", what, fix)
    if len(configs) > 1 and room is not None and together > room:
        what = f"the models that are loaded at start need {size(together)}, only {size(room)} available"
        fix = "give some of them `load: on-demand`, a smaller n_ctx or a smaller kv_type"
        yield Finding("memory of all", "blocks", what, fix)


def check_computing(config: Config, name: str = "") -> Findings:
    """Compute two tokens of a model in a process of its own, as before it is loaded on demand."""
    from uma_trio.backend.base import ModelError
    from uma_trio.models.files import try_computing

    try:
        try_computing(config)
    except (ConfigError, ModelError) as error:
        yield Finding(f"computing{name}", "blocks", str(error))


@frozen
class _Bytes:
    """The smallest vocabulary that a schema can be compiled for: a token for each byte, and an end."""

    n_vocab: int = 257
    end_tokens: frozenset[int] = frozenset({256})

    def pieces(self) -> Sequence[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b""]


def check_structured_output() -> Findings:
    """Start a process as the first schema would, and have it compile one."""
    from uma_trio.text.confinement import Confinement
    from uma_trio.text.shape import Shape, Unconstrainable

    confinement = Confinement(_Bytes())
    try:
        confinement.check(Shape("schema", '{"type": "object"}'))
    except Unconstrainable as error:
        fix = (
            "schemas, grammars and tools are refused until it can; look for a limit on processes (ulimit -u) "
            "or memory (ulimit -v), or a sandbox that forbids to start programs"
        )
        yield Finding("structured output", "slow", f"a schema {error}", fix)
    finally:
        confinement.close()


def check_limits(config: Config) -> Findings:
    """See whether the system grants the files and the processor time that are needed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the daemon raises the soft limit
    need = files_needed(config.max_sessions)
    if most != resource.RLIM_INFINITY and most < need:
        what = f"--max-sessions {config.max_sessions} needs {need} open files, {most} are allowed"
        fix = "set fewer --max-sessions, or a higher hard limit (ulimit -Hn, as root)"
        yield Finding("open files", "slow", what, fix)
    cores, quota = physical_cores(), cpu_quota()
    threads = config.threads or cores
    if threads > cores:
        within = f", {quota:g} of processor time" if quota is not None else ""
        what = f"--threads {threads} on {cores} physical cores{within}: threads wait for each other"
        yield Finding("threads", "slow", what, f"--threads {cores}")


# --- socket and HTTP ---


def check_socket(path: Path, about: str = "socket") -> Findings:
    """See whether the socket is free, served, or stale; `about` is the name of its option, too."""
    other = f"choose another --{about}"
    if str(path).startswith(FRAMED_TCP):
        yield from _check_port(parse_framed(str(path)), "socket", _framed_problem(str(path)))
        return
    from uma_trio.sockets.listener import too_long
    from uma_trio.sockets.path import holder_of

    folder = path.parent
    if problem := too_long(path):
        yield Finding(about, "blocks", problem, f"choose a shorter --{about}")
    elif not folder.is_dir():
        what = f"the folder {folder} does not exist"
        yield Finding(about, "blocks", what, f"mkdir -p {folder}, or {other}")
    elif not os.access(folder, os.W_OK | os.X_OK):
        what = f"this user cannot write to the folder {folder}"
        yield Finding(about, "blocks", what, f"change its permissions, or {other}")
    elif not os.path.lexists(path):
        if (holder := holder_of(str(path))) is not None:
            what = f"{path} does not exist but is locked: a daemon is starting, or its socket was removed"
            fix = f"wait a moment; if the message stays, restart process {holder}"
            yield Finding(about, "blocks", what, fix)
    elif not stat.S_ISSOCK(path.lstat().st_mode):
        yield Finding(
            about, "blocks", f"{path} exists and is not a socket", f"move it away, or {other}"
        )
    elif (owner := path.lstat().st_uid) != os.geteuid():
        yield Finding(about, "blocks", f"{path} belongs to user {owner}", other)
    elif (holder := holder_of(str(path))) is not None and not accepts(path):
        what = f"{path} is held by a daemon that is stopping"
        yield Finding(about, "blocks", what, f"wait until process {holder} has ended")


def check_http(config: Config) -> Findings:
    """See whether HTTP can be served as the settings say, or is being served."""
    from uma_trio.app.http import http_settings
    from uma_trio.cli.launch import unreachable

    address = config.http_address
    if address is None:
        return
    if address.path:
        yield from check_socket(Path(address.path), "http")
        return
    if not address.is_loopback and config.http_key_file is None:
        what = f"other machines can reach {address.url}, and there is no key"
        yield Finding("http", "blocks", what, "set --http-key-file, or omit the host")
        return
    try:
        http_settings(config)
    except ConfigError as error:
        yield Finding("http", "blocks", str(error))
        return
    yield from _check_port(address, "http", unreachable(address))


def _check_port(address: Address, about: str, unreachable: str | None) -> Findings:
    """See whether a TCP port is free; `unreachable` says why no daemon answers there, None if one does."""
    from uma_trio.sockets.port import PortUnusable, bound

    try:
        bound(address, f"--{about}").close()
    except PortUnusable as error:
        if "something else" in str(error):
            if unreachable is None:
                return
            fix = f"choose another --{about}, or stop the program that uses it"
            yield Finding(about, "blocks", unreachable, fix)
        else:
            yield Finding(about, "blocks", str(error), f"choose another --{about}")


def _framed_problem(address: str) -> str | None:
    from uma_trio.client import ConnectionFailed
    from uma_trio.client.reach import DaemonAddress

    try:
        place = DaemonAddress(address)
        with place.new_socket() as sock:
            sock.settimeout(1)
            place.connect(sock)
    except ConnectionFailed as error:
        return str(error)
    return None


# --- the running daemon ---


def ask(path: Path) -> SelfReport:
    """Return what the daemon on the socket `path` reports; nothing unless one answers soon."""

    async def report(client: Client) -> SelfReport:
        metrics = await client.metrics()
        return SelfReport(metrics, (await client.overview()).settings)

    return answer_of(path, report) or SelfReport()


def check_running(metrics: Mapping[str, Any]) -> Findings:
    """Judge the metrics of a running daemon."""
    from uma_trio.policy.costing.neighbours import in_words
    from uma_trio.policy.prefix import PAGE

    computed, cached, evicted = (
        metrics.get(f"{name}_total", 0)
        for name in ("prompt_tokens", "prefix_tokens", "prefix_ghost_hits")
    )
    # An evicted page was computed again, so that it is among the computed tokens.
    more = min(PAGE * evicted, computed) / max(1, computed + cached)
    if more >= _WORTH_SAYING:
        what = (
            f"{cached / (computed + cached):.0%} of {computed + cached:,} prompt tokens were cached; twice the "
            f"--prefix-ram would have cached {more:.0%} more"
        )
        yield Finding("prefix cache", "slow", what, "set a larger --prefix-ram, if memory is free")
    lag = metrics.get("loop_lag_ms") or {}
    if lag.get("count") and lag["p99"] > _LATE_MS:
        what = f"tokens waited {lag['p99']:.1f} ms for the daemon's event loop (p99)"
        fix = "leave a core to it: stop other programs, or set fewer --threads"
        yield Finding("event loop", "slow", what, fix)
    if others := metrics.get("cost_others_share"):
        fix = "stop other programs for a minute while the daemon is idle"
        yield Finding("cost table", "slow", in_words(others), fix)


# --- output ---


def _show(report: Report, flags: Mapping[str, str | None]) -> None:
    from rich.text import Text

    marks = {"slow": ("slow  ", "yellow"), "blocks": ("BLOCKS", "red")}
    out = console()
    width = max(_LEAST_WIDTH, out.width - len(_INDENT))
    for about in report.system:
        out.print(about, soft_wrap=True)
    for finding in report.findings:
        mark, colour = marks[finding.weight]
        text = Text.assemble((f"{finding.about}: ", "bold"), finding.what)
        first, *more = text.wrap(out, width)
        out.print(Text.assemble((mark, colour), "  ", first), soft_wrap=True)
        more += Text(f"fix: {finding.fix}").wrap(out, width) if finding.fix else []
        for line in more:
            out.print(Text.assemble(_INDENT, line), soft_wrap=True)
    say(_verdict(report, flags))


def _verdict(report: Report, flags: Mapping[str, str | None]) -> str:
    blocking = sum(finding.weight == "blocks" for finding in report.findings)
    if blocking:
        return f"{blocking} of these must be fixed before the daemon can run."
    if report.is_running:
        return f"A daemon is running: {how_to_ask(settings.load(flags).socket)}"
    if report.findings:
        return f"The daemon can run; {len(report.findings)} of these would slow it down."
    given = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items() if value]
    return f"The daemon can run: {program()} {shlex.join(['serve', *chain(*given)])}"
