"""What `doctor` looks at: each check returns findings, each finding what to do about it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from uma_trio.config.errors import ConfigError
from uma_trio.config.hardware import cpu_features, cpu_quota, files_needed, physical_cores
from uma_trio.config.options import Config
from uma_trio.words import size

if TYPE_CHECKING:
    from uma_trio.backend.needs import Estimate
    from uma_trio.backend.placement import Placement

Weight = Literal["ok", "slow", "blocks"]

# What the kernel calls a feature, and what llama.cpp calls having been compiled for it.
_FEATURES = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}
# Device files that only a GPU's driver makes, and how llama.cpp is compiled for it.
_GPU_FILES = {"dev/nvidiactl": "-DGGML_CUDA=on", "dev/kfd": "-DGGML_HIP=on"}
_REBUILD = "rm -r .venv ~/.cache/uma-trio/wheels && make setup"
_SHAPES_FIX = (
    "schemas, grammars and tools are refused until it can; look for a limit on processes (ulimit -u) "
    "or memory (ulimit -v), or a sandbox that forbids to start programs"
)
_PROBE = (
    "import attrs, json, sys\n"
    "from uma_trio.backend.llama import system_info\n"
    "json.dump(attrs.asdict(system_info()), sys.stdout, default=dict)"
)


@frozen
class Finding:
    """One thing that was looked at. `fix` is empty where nothing needs one."""

    about: str
    weight: Weight
    what: str
    fix: str = ""


@frozen
class Probe:
    """What llama.cpp reports about itself; `info` is empty if it cannot be loaded."""

    status: int
    info: Mapping[str, Any]
    stderr: str = ""

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """What layers can be offloaded to."""
        return [device for device in self.info.get("devices", ()) if "gpu" in device["kind"]]

    @property
    def devices(self) -> list[str]:
        """Their names, for people."""
        return [device["description"] or device["name"] for device in self.gpus]


def probe_llama(wanted: str) -> Probe:
    """Ask the build of llama.cpp that --llama `wanted` names what it was compiled for."""
    command = [sys.executable, "-c", _PROBE]
    env = {**os.environ, "UMA_LLAMA": wanted}
    # In a process of its own: a library compiled for another processor dies of SIGILL.
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603
    info = {} if done.returncode else json.loads(done.stdout)
    return Probe(done.returncode, info, done.stderr)


def check_llama(probe: Probe) -> list[Finding]:
    """Compare what llama.cpp was compiled for with this processor."""
    from uma_trio.backend.bindings import PACKAGED

    if probe.status:
        return [_cannot_load(probe.status, probe.stderr)]
    info, gpus = probe.info, probe.gpus
    features: dict[str, dict[str, str]] = info["features"]
    where = ", ".join(f"{d['name']} ({d['description']})" for d in gpus) or "the CPU alone"
    version = f"{info['build']}, ggml {info['ggml_version']}"
    backends = ", ".join(features) or "none"
    found = [Finding("llama.cpp", "ok", f"{version}; backends {backends}; can compute on {where}")]
    if info["gpu_offload"] and not gpus:
        fix = "check the driver (nvidia-smi, vulkaninfo, rocminfo); without a GPU the CPU is used"
        what = "compiled for a GPU, but no GPU is found"
        found.append(Finding("llama.cpp", "slow", what, fix))
    if not info["gpu_offload"] and (flag := _flag_for_gpu()):
        what = "compiled for the CPU only, but this machine has a GPU's device file"
        fix = f"install a build for it, or export CMAKE_ARGS={flag} && make setup (README, GPU)"
        found.append(Finding("llama.cpp", "slow", what, fix))
    packaged = info["module"] == PACKAGED
    cpu = features.get("CPU", {})
    return [*found, *compare_features(cpu, cpu_features(), packaged=packaged)]


def _flag_for_gpu(root: Path = Path("/")) -> str | None:
    """Return what llama.cpp would be compiled with for a GPU whose driver is here."""
    return next((flag for name, flag in _GPU_FILES.items() if (root / name).exists()), None)


def compare_features(
    compiled: Mapping[str, str], present: frozenset[str], *, packaged: bool = False
) -> list[Finding]:
    """Return what the processor has and the library was not compiled for.

    A `packaged` library has a variant for each of the common processors, and took the best one for this.
    """
    used = [name for name, value in compiled.items() if value == "1"]
    unused = [ours for kernel, ours in _FEATURES.items() if kernel in present and ours not in used]
    found = [Finding("CPU features", "ok", f"in use: {' '.join(used) or 'none'}")]
    if compiled.get("AMX_INT8") == "miscompiled":
        what = "compiled with a GCC that miscompiles AMX, so AMX and repacking are disabled"
        fix = "use GCC 12.4, 13.3, 14 or clang, or build without AMX as `make setup` does"
        found.append(Finding("CPU features", "slow", what, fix))
    if unused:
        fix = f"unset SOURCE_DATE_EPOCH and GGML_NATIVE=OFF in CMAKE_ARGS, then {_REBUILD}"
        if packaged:
            fix = "measure one that is compiled here: pip install 'uma-trio[source]', --llama llama_cpp"
        what = f"not used by this build: {' '.join(unused)}"
        found.append(Finding("CPU features", "ok" if packaged else "slow", what, fix))
    return found


def _cannot_load(status: int, stderr: str) -> Finding:
    if status == -signal.SIGILL:
        what = "llama.cpp was compiled for another processor and cannot run on this one"
        return Finding("llama.cpp", "blocks", what, _REBUILD)
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    if "LlamaRefused: " in last:  # it says what to do
        return Finding("llama.cpp", "blocks", last.partition("LlamaRefused: ")[2])
    return Finding("llama.cpp", "blocks", f"cannot be loaded (status {status}): {last}", _REBUILD)


def check_policy(config: Config) -> list[Finding]:
    """See whether there is such a policy, and whether it can do without what is left out."""
    from uma_trio.app.wiring import chosen_policy

    try:
        chosen_policy(config)
    except ConfigError as error:
        return [Finding("policy", "blocks", str(error))]
    return [Finding("policy", "ok", config.policy)]


def check_model(config: Config, devices: Sequence[str] = ()) -> list[Finding]:
    """See whether the model is one, and where its layers go; `devices` are those that layers can be offloaded to."""
    from uma_trio.app.wiring import gives_of, model_path
    from uma_trio.backend.base import ModelError
    from uma_trio.backend.gguf_header import read_header
    from uma_trio.backend.kv_memory import attention_only
    from uma_trio.backend.placement import Placement
    from uma_trio.config.errors import ConfigError

    try:
        path = model_path(config)
        header = read_header(path)
        if (gives := gives_of(config)) != "text":
            what = f"{path}: a file of {size(header.size_bytes)}; it gives {gives}, computed on the CPU"
            return [Finding("model", "ok", what)]
        placement = Placement.of(header.number("block_count"), devices, config.gpu_layers)
    except (ConfigError, ModelError) as error:
        return [Finding("model", "blocks", str(error))]
    found = [Finding("model", "ok", f"{path}: a file of {size(header.size_bytes)}")]
    found += [_layers(placement, config, devices), *_check_mlock(config, header.size_bytes)]
    if not attention_only(header):
        what = "off: the model's state cannot go back to an earlier token"
        found.append(Finding("prefix cache", "ok", what))
    return found


def _layers(placement: Placement, config: Config, devices: Sequence[str]) -> Finding:
    """Say where the layers go, and what to do where somebody may want them elsewhere."""
    layers, wanted = placement.layers, config.gpu_layers
    if placement.offloaded == layers:
        return Finding("layers", "ok", f"all {layers} on {placement.devices}")
    if placement.on_gpu:
        what = (
            f"{placement.offloaded} of {layers} on {placement.devices}; the CPU computes the rest"
        )
        fix = "omit --gpu-layers if all layers fit; otherwise use a smaller model or --n-ctx"
        return Finding("layers", "slow", what, fix)
    if devices:
        what = f"all {layers} on the CPU because of --gpu-layers 0; available: {', '.join(devices)}"
        return Finding("layers", "slow", what, "omit --gpu-layers")
    if wanted > 0:
        what = f"all {layers} on the CPU: --gpu-layers {wanted}, and llama.cpp finds no GPU"
        return Finding("layers", "slow", what, "build llama.cpp for the GPU (README, GPU)")
    return Finding("layers", "ok", f"all {layers} on the CPU")


def _check_mlock(config: Config, weights: int) -> list[Finding]:
    if not config.mlock:
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= weights:
        return [Finding("mlock", "ok", "the limit on locked memory is high enough")]
    what = f"--mlock needs {size(weights)} of locked memory, the limit is {size(soft)}"
    return [Finding("mlock", "slow", what, "ulimit -l unlimited, or omit --mlock")]


def name_of(config: Config) -> str:
    """Return what a model is called where there are several."""
    if config.alias:
        return config.alias[0]
    return "the bundled model" if config.model is None else config.model.stem


def check_memory(configs: Sequence[Config]) -> list[Finding]:
    """See what each model takes and with which context it fits; and whether those loaded at start fit together."""
    from uma_trio.app.wiring import estimate
    from uma_trio.backend.base import ModelError
    from uma_trio.backend.kv_memory import available_memory
    from uma_trio.config.errors import ConfigError

    room = available_memory()
    found, together = [], 0
    for config in configs:
        name = name_of(config)
        about = "memory" if len(configs) == 1 else f"memory of {name}"
        try:
            needed = estimate(config)
        except (ConfigError, ModelError) as error:
            found.append(Finding(about, "blocks", str(error)))
            continue
        if config is configs[0] or config.load == "start":
            together += needed.needs.private
        found.append(_judged(about, needed, room))
    if len(configs) > 1 and room is not None and together > room:
        what = f"the models that are loaded at start need {size(together)}, only {size(room)} available"
        fix = "give some of them `load: on-demand`, a smaller n_ctx or a smaller kv_type"
        found.append(Finding("memory of all", "blocks", what, fix))
    return found


def check_computing(configs: Sequence[Config]) -> list[Finding]:
    """See whether two tokens of each model can be computed, in a process of its own, as before it is loaded on demand."""
    from uma_trio.app.wiring import try_computing
    from uma_trio.backend.base import ModelError
    from uma_trio.config.errors import ConfigError

    found = []
    for config in configs:
        about = "computing" if len(configs) == 1 else f"computing of {name_of(config)}"
        try:
            try_computing(config)
        except (ConfigError, ModelError) as error:
            found.append(Finding(about, "blocks", str(error)))
        else:
            found.append(Finding(about, "ok", "two tokens were computed in a process of its own"))
    return found


def _judged(about: str, needed: Estimate, room: int | None) -> Finding:
    need = needed.needs
    what = (
        f"{size(need.total)} needed: {size(need.own + need.mapped)} of weights, {size(need.kv)} of KV cache, "
        f"{size(need.compute)} to compute with"
    )
    if need.device:
        what += f"; {size(need.device)} on the GPU"
    if room is None:
        return Finding(about, "ok", what)
    most = needed.largest_context(room)
    if need.total <= room:
        enough = f", enough for --n-ctx {most}" if needed.curve[1:] else ""
        return Finding(about, "ok", f"{what}; {size(room)} available{enough}")
    fits = f"--n-ctx {most}" if most else "a smaller quantisation"
    fix = f"use {fits}, --kv-type q8_0 or a smaller model, or close other programs"
    what += f"; only {size(room)} available"
    return Finding(about, "blocks" if need.private > room else "slow", what, fix)


@frozen
class _Bytes:
    """The smallest vocabulary that a schema can be compiled for: one token for each byte, and an end."""

    n_vocab: int = 257
    end_tokens: frozenset[int] = frozenset({256})

    def pieces(self) -> Sequence[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b""]


def check_shapes() -> list[Finding]:
    """Start a process as the first schema would, and have it compile one."""
    from uma_trio.text.confinement import Confinement
    from uma_trio.text.shape import Shape, Unconstrainable

    confinement = Confinement(_Bytes())
    began = time.monotonic()
    try:
        confinement.check(Shape("schema", '{"type": "object"}'))
    except Unconstrainable as error:
        return [Finding("structured output", "slow", f"a schema {error}", _SHAPES_FIX)]
    finally:
        confinement.close()
    took = time.monotonic() - began
    return [
        Finding("structured output", "ok", f"schemas are compiled apart: {took:.1f} s to start")
    ]


def check_limits(config: Config) -> list[Finding]:
    """See whether the system grants the files and the processor time that are wanted."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [judge_files(config.max_sessions, most)]
    cores, quota = physical_cores(), cpu_quota()
    threads = config.threads or cores
    within = f", {quota:g} of processor time" if quota is not None else ""
    if threads <= cores:
        return [*found, Finding("threads", "ok", f"{threads} of {cores} physical cores{within}")]
    what = f"--threads {threads} on {cores} physical cores{within}: threads wait for each other"
    return [*found, Finding("threads", "slow", what, f"--threads {cores}")]


def judge_files(max_sessions: int, most: int) -> Finding:
    """See whether so many clients find files to open; the daemon itself goes up to `most`."""
    need = files_needed(max_sessions)
    if most == resource.RLIM_INFINITY:
        return Finding("open files", "ok", f"{need} needed, no limit")
    if most >= need:
        return Finding("open files", "ok", f"{need} needed, {most} allowed")
    what = f"--max-sessions {max_sessions} needs {need} open files, {most} are allowed"
    fix = "set fewer --max-sessions, or a higher hard limit (ulimit -Hn, as root)"
    return Finding("open files", "slow", what, fix)
