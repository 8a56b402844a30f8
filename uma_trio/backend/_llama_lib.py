"""The library as our backend calls it: prototypes, the log, what this build can do.

Two kinds of prototypes. ``ctypes.CDLL`` gives the GIL up around a call; getting it back next
to a busy event loop can take up to the switch interval (5 ms), which is right for
``llama_decode`` and wrong for reading a pointer. Functions that are tiny, start no threads and
write no log are therefore called with the GIL held (`_with_gil`); all others give it up (`freed`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from attrs import frozen

from uma_trio.backend._llama_binding import build, llama, load_backends, text_of
from uma_trio.words import one_line

LogLevel = Literal["debug", "info", "warning", "error"]
MISCOMPILED: Final = "miscompiled"  # in place of a feature's 1
LogSink = Callable[[LogLevel, str], None]

_void_p = ctypes.c_void_p
_i32 = ctypes.c_int32
_LIB: Final[ctypes.CDLL] = llama._lib  # noqa: SLF001 - the handle has no public name


def _with_gil(name: str, restype: Any, *argtypes: Any) -> Callable[..., Any]:
    return ctypes.PYFUNCTYPE(restype, *argtypes)((name, _LIB))


def freed(name: str, restype: Any, *argtypes: Any) -> Callable[..., Any]:
    """Return a library function that gives the GIL up while it runs."""
    return ctypes.CFUNCTYPE(restype, *argtypes)((name, _LIB))


decode = freed("llama_decode", _i32, _void_p, llama.llama_batch)
encode = freed("llama_encode", _i32, _void_p, llama.llama_batch)
synchronize = freed("llama_synchronize", None, _void_p)
embeddings_seq = _with_gil("llama_get_embeddings_seq", _void_p, _void_p, _i32)
get_logits = _with_gil("llama_get_logits", _void_p, _void_p)
# It writes a line of debug log, twice for each decode that may be interrupted, which are few.
set_abort_callback = _with_gil("llama_set_abort_callback", None, _void_p, _void_p, _void_p)
# llama.cpp asks after each node of its graph whether to go on. Asking Python would take the GIL
# each time, in the middle of a computation; asking libc how long a text is takes nanoseconds. The
# text is our flag: "" is no, anything else is yes.
strlen: Final = ctypes.cast(ctypes.CDLL(None).strlen, _void_p)
seq_rm = _with_gil("llama_memory_seq_rm", ctypes.c_bool, _void_p, _i32, _i32, _i32)
seq_cp = _with_gil("llama_memory_seq_cp", None, _void_p, _i32, _i32, _i32, _i32)
seq_pos_max = _with_gil("llama_memory_seq_pos_max", _i32, _void_p, _i32)
seq_pos_min = _with_gil("llama_memory_seq_pos_min", _i32, _void_p, _i32)
_size, _u32 = ctypes.c_size_t, ctypes.c_uint32
state_size = freed("llama_state_seq_get_size_ext", _size, _void_p, _i32, _u32)
state_get = freed("llama_state_seq_get_data_ext", _size, _void_p, _void_p, _size, _i32, _u32)
state_set = freed("llama_state_seq_set_data_ext", _size, _void_p, _void_p, _size, _i32, _u32)
_bool = ctypes.c_bool
tokenize = freed(
    "llama_tokenize", _i32, _void_p, ctypes.c_char_p, _i32, _void_p, _i32, _bool, _bool
)
# Called for every token once: without argument types a call takes half the time. Plain ints
# then go as C ints, and pointers must be given as c_void_p.
token_to_piece = ctypes.PYFUNCTYPE(_i32)(("llama_token_to_piece", _LIB))
is_eog = ctypes.PYFUNCTYPE(_bool)(("llama_vocab_is_eog", _LIB))
attributes = ctypes.PYFUNCTYPE(_i32)(("llama_vocab_get_attr", _LIB))

# ggml/include/ggml.h, enum ggml_log_level (the package's own table is off by one from here on).
_LEVELS: Final[Mapping[int, LogLevel]] = {1: "debug", 2: "info", 3: "warning", 4: "error"}
_CONTINUE: Final = 5  # GGML_LOG_LEVEL_CONT: the rest of the line before
# That all cells together are more or fewer than the model was trained for. One sequence never
# gets more than that (`LlamaBackend.load`), and how much it gets is told when the daemon is ready.
# And what llama.cpp says of a decode or an encode that we interrupted, and of vocabularies.
_EXPECTED: Final = re.compile(
    r"n_ctx_seq \(\d+\) [<>] n_ctx_train \(\d+\)"
    r"|compute_async failed with error 1$|compute status: 1$|failed to (?:de|en)code, ret = 2$"
    r"|removing memory module entries"
    # What llama.cpp mends in a vocabulary by itself while it loads (llama-vocab.cpp). That a vocabulary has
    # no or an unknown pre-tokenizer is told: then texts are split as the model was not trained for.
    r"|control-looking token:|control token: .* is not marked as EOG"
    r"|special_eo[a-z]_id is not in special_eog_ids|special_eog_ids contains both"
    r"|is a normal token here, removing it from EOG list|EOG token id \d+ is out of range"
    r"|model vocab missing newline token"
)


def _drop(_level: LogLevel, _text: str) -> None:
    """Take a line of llama.cpp's log and do nothing with it."""


class _Log:
    """llama.cpp's log, put together to lines, given to one sink for the whole process.

    Called from any thread, also from llama.cpp's own; a sink must not call the library.
    """

    def __init__(self) -> None:
        self.sink: LogSink = _drop
        self.recent_errors: deque[str] = deque(maxlen=8)
        self._level: LogLevel = "info"
        self._line = ""
        self._quiet: tuple[LogLevel, ...] = ("debug", "info")
        self._callback = llama.llama_log_callback(self._receive)  # must outlive the library

    def listen(self) -> None:
        """Take the lines that are information, too."""
        self._quiet = ("debug",)

    def install(self) -> None:
        """Take llama.cpp's log away from the package's own printer."""
        llama.llama_log_set(self._callback, _void_p(0))

    def _receive(self, level: int, text: bytes | None, _user_data: object) -> None:
        if level != _CONTINUE:
            self._level = _LEVELS.get(level, "info")
        if self._level in self._quiet:
            return
        self._line += (text or b"").decode("utf-8", "replace")
        if self._line.endswith("\n") or len(self._line) > 4096:
            line, self._line = one_line(self._line.strip()), ""  # it may quote a file
            if self._level == "error" and line:
                self.recent_errors.append(line)
            if line and not _EXPECTED.search(line):
                self.sink(self._level, line)


_log: Final = _Log()


@functools.cache
def start() -> None:
    """Initialise llama.cpp, once for the process, and quiet its log."""
    # On an assert, ggml would start a debugger on us to print where it was.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    _log.install()
    load_backends()
    llama.llama_backend_init()


def set_log_sink(sink: LogSink | None, *, with_info: bool = False) -> None:
    """Send llama.cpp's warnings and errors to `sink`, a line at a time; None drops them.

    `with_info`: from now on what it tells besides, too.
    """
    _log.sink = sink if sink is not None else _drop
    if with_info:
        _log.listen()


def forget_errors() -> None:
    """Start listening for the errors of one operation."""
    _log.recent_errors.clear()


def last_error() -> str:
    """Return the most telling error line since `forget_errors`, "" if there was none.

    llama.cpp logs the cause first and then, caller by caller, that something failed.
    """
    for line in _log.recent_errors:
        # "llama_model_load: error loading model: missing tensor 'x'" -> the last part
        return line.split(": ", 1)[-1].removeprefix("error loading model: ").rstrip(".")
    return ""


@frozen
class Device:
    """One thing that can compute."""

    name: str
    description: str
    kind: Literal["cpu", "gpu", "integrated gpu", "accelerator", "other"]


@frozen
class SystemInfo:
    """What this build of llama.cpp is and can do on this machine."""

    build: str  # which distribution of it, and its version
    module: str  # of its binding
    ggml_version: str
    ggml_commit: str  # "unknown" in builds from an archive
    features: Mapping[str, Mapping[str, str]]  # compute backend -> feature -> value
    devices: tuple[Device, ...]
    gpu_offload: bool
    mmap: bool
    mlock: bool

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The devices that layers can be offloaded to."""
        return tuple(d for d in self.devices if d.kind in ("gpu", "integrated gpu"))


def parse_features(line: str) -> dict[str, dict[str, str]]:
    """Take ``CPU : AVX2 = 1 | FMA = 1 | CUDA : ARCHS = 750 |`` apart, by backend."""
    features: dict[str, dict[str, str]] = {}
    backend = ""
    for item in line.split(" | "):
        name, _, value = item.strip(" |").partition(" = ")
        if " : " in name:
            backend, _, name = name.partition(" : ")
        if name:
            features.setdefault(backend.strip(), {})[name.strip()] = value.strip()
    return features


def _features() -> dict[str, dict[str, str]]:
    found = parse_features(llama.llama_print_system_info().decode("utf-8", "replace"))
    if amx_is_miscompiled():
        found["CPU"]["AMX_INT8"] = MISCOMPILED
    return found


@functools.cache
def amx_is_miscompiled() -> bool:
    """Whether this build would crash in AMX, on the first prompt of a quantised model."""
    if b"AMX_INT8 = 1" not in llama.llama_print_system_info():
        return False
    files = build.libraries.glob("libggml-cpu*")
    return any(gets_amx_wrong(file.read_bytes()) for file in files)


def gets_amx_wrong(library: bytes) -> bool:
    """Whether a library was made by a GCC that optimises AMX's tile configuration away.

    GCC PR target/114098, fixed in 12.4, 13.3 and 14. Compilers sign what they make.
    """
    if b"clang version" in library:
        return False
    signatures = re.findall(rb"GCC: \([^)]*\) (\d+)\.(\d+)", library)
    versions = [(int(major), int(minor)) for major, minor in signatures]
    return any(v < (12, 4) or (13, 0) <= v < (13, 3) for v in versions)


def system_info() -> SystemInfo:
    """Ask llama.cpp about itself and its devices. Needs no model."""
    start()
    return SystemInfo(
        build=build.about,
        module=build.module,
        ggml_version=text_of(_LIB, "ggml_version"),
        ggml_commit=text_of(_LIB, "ggml_commit"),
        features=_features(),
        devices=_devices(),
        gpu_offload=bool(llama.llama_supports_gpu_offload()),
        mmap=bool(llama.llama_supports_mmap()),
        mlock=bool(llama.llama_supports_mlock()),
    )


def cpu_buffer_type() -> int:
    """Return ggml's handle for buffers in the machine's memory."""
    return int(_with_gil("ggml_backend_cpu_buffer_type", _void_p)())


def free_device_memory() -> int | None:
    """Return the bytes that are free on all GPUs together; None where there is none, or it is not said.

    Asks the drivers: for a helper thread.
    """
    try:
        get = freed("ggml_backend_dev_get", _void_p, ctypes.c_size_t)
        kind = freed("ggml_backend_dev_type", ctypes.c_int, _void_p)
        count = freed("ggml_backend_dev_count", ctypes.c_size_t)()
        size = ctypes.POINTER(ctypes.c_size_t)
        ask = freed("ggml_backend_dev_memory", None, _void_p, size, size)
    except AttributeError:
        return None
    found: list[int] = []
    for device in [get(index) for index in range(count)]:
        if _KINDS.get(kind(device)) == "gpu":
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            ask(device, ctypes.byref(free), ctypes.byref(total))
            found.append(free.value)
    return sum(found) if found else None


_KINDS: Final = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator"}


def _devices() -> tuple[Device, ...]:
    try:
        get = freed("ggml_backend_dev_get", _void_p, ctypes.c_size_t)
        name = freed("ggml_backend_dev_name", ctypes.c_char_p, _void_p)
        description = freed("ggml_backend_dev_description", ctypes.c_char_p, _void_p)
        kind = freed("ggml_backend_dev_type", ctypes.c_int, _void_p)
        count = freed("ggml_backend_dev_count", ctypes.c_size_t)()
    except AttributeError:
        return ()
    devices = []
    for device in [get(index) for index in range(count)]:
        devices.append(
            Device(
                (name(device) or b"").decode("utf-8", "replace"),
                (description(device) or b"").decode("utf-8", "replace").strip(),
                _KINDS.get(kind(device), "other"),  # type: ignore[arg-type]
            )
        )
    return tuple(devices)
