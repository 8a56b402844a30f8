"""The binding of the build that is used: its module, loaded and known to fit.

A library of another commit has other structures than the binding. It would load, compute, and corrupt
memory, so it is refused here by what it says of itself and by the values that it puts into its structures.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from uma_trio.backend.bindings import COMMIT, Build, LlamaRefused, current

# Of include/llama.h and ggml/CMakeLists.txt at COMMIT.
_LLAMA_VERSION: Final = "0.5.0"
_GGML_VERSION: Final = "0.25.3"
# llama_context_default_params and llama_model_default_params (src/llama-context.cpp, src/llama-model.cpp).
# A field that is elsewhere in the library's structure has another's value.
_CONTEXT: Final[Mapping[str, object]] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "flash_attn_type": -1,
    "yarn_beta_slow": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
    "ctx_other": None,
}
_MODEL: Final[Mapping[str, object]] = {
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
# A structure of another commit may be larger than ours; this much more may be written.
_ROOM: Final = 4096


def _load(build: Build) -> Any:
    if build.foreign:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(build.libraries)
    try:
        return _binding_of(build.module)
    except (OSError, RuntimeError, AttributeError) as error:
        raise LlamaRefused(f"{build.about} cannot be loaded: {error}") from error


def _binding_of(package: str) -> Any:
    """Import the module with the functions alone: what the package itself imports takes 5 MB and 0.1 s."""
    name, spec = f"{package}.llama_cpp", importlib.util.find_spec(package)
    if package in sys.modules or spec is None or spec.submodule_search_locations is None:
        return importlib.import_module(name)
    stub = sys.modules[package] = ModuleType(package)
    stub.__path__ = list(spec.submodule_search_locations)
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[package]


def text_of(library: Any, name: str) -> str:
    """Call a function without arguments that returns a text; "" if the library has none such."""
    try:
        function = ctypes.CFUNCTYPE(ctypes.c_char_p)((name, library))
    except AttributeError:
        return ""
    return (function() or b"").decode("utf-8", "replace")


def problem(module: Any) -> str:
    """Return why the library of a binding is not the one that the binding is for; "" if it is."""
    library = module._lib  # noqa: SLF001 - the handle has no public name
    commit = text_of(library, "ggml_commit").removesuffix("-dirty")
    if commit and commit != "unknown" and not _same_commit(commit):
        return f"it is of commit {commit}, and not of {COMMIT}"
    for name, expected in (("llama_version", _LLAMA_VERSION), ("ggml_version", _GGML_VERSION)):
        version = text_of(library, name).partition("-")[0]
        if version != expected:
            return f"its {name} is {version or 'unknown'}, and not {expected}"
    for name, defaults in (("context", _CONTEXT), ("model", _MODEL)):
        params = _defaults(module, library, name)
        for field, default in defaults.items():
            if (value := getattr(params, field)) != default:
                return f"its {name} parameters differ ({field} is {value}, and not {default})"
    return ""


def _same_commit(commit: str) -> bool:
    return commit.startswith(COMMIT) or (len(commit) >= 7 and COMMIT.startswith(commit))


def _defaults(module: Any, library: Any, name: str) -> Any:

    class Roomy(ctypes.Structure):
        _fields_ = (
            ("params", getattr(module, f"llama_{name}_params")),
            ("room", ctypes.c_char * _ROOM),
        )

    make = ctypes.CFUNCTYPE(Roomy)((f"llama_{name}_default_params", library))
    return make().params


def load_backends() -> None:
    """Have ggml load what computes, in builds that bring it as libraries of their own.

    ggml takes the variant for the CPU that it runs on, the best of those in the folder. It must be done
    before the first model is loaded.
    """
    library = llama._lib  # noqa: SLF001
    count = ctypes.CFUNCTYPE(ctypes.c_size_t)(("ggml_backend_reg_count", library))
    if count():
        return
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    prototype(("ggml_backend_load_all_from_path", library))(os.fsencode(build.libraries))
    if not count():
        raise LlamaRefused(f"{build.about} has nothing in {build.libraries} that runs on this CPU.")


def _ready(build: Build) -> Any:
    module = _load(build)
    if why := problem(module):
        raise LlamaRefused(
            f"{build.about} cannot be used: {why}. Install the right one (README, Install),"
            " or choose another with --llama."
        )
    return module


build: Final = current()
#: The binding's module, `llama_cpp.llama_cpp` or the same in our own distribution.
llama: Final[Any] = _ready(build)
