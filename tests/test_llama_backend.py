"""llama.cpp itself, on a random model of a few hundred kilobytes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from engine_kit import Bench
from memory_kit import resident_kib

from models.synthetic import PRESETS, write_model
from uma_trio.app.build import load_backend
from uma_trio.backend import _llama_lib
from uma_trio.backend._llama_info import described
from uma_trio.backend._llama_lib import LogLevel, parse_features
from uma_trio.backend._llama_options import Placement
from uma_trio.backend._llama_vocab import cut_long_lines
from uma_trio.backend.base import BackendDied, DecodeStatus, ModelError
from uma_trio.backend.llama import OVER, LlamaBackend, system_info
from uma_trio.config.options import Config
from uma_trio.models import bundled_model
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.state import SchedulerState

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model once."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def load(path: Path, **options: object) -> LlamaBackend:
    """Load with small sizes unless told otherwise."""
    sizes: dict[str, object] = {"n_ctx": 256, "n_slots": 2, "n_batch": 32, "threads": 1}
    return LlamaBackend.load(path, **(sizes | options))  # type: ignore[arg-type]


def test_what_is_loaded_is_described(tiny: Path) -> None:
    """Names, sizes and the compute backend are read from the model and the library."""
    backend = load(tiny, kv_type="q8")
    assert backend.model.name
    assert backend.model.n_vocab == 260
    assert backend.model.path == str(tiny)
    assert "<|im_start|>" in (backend.model.chat_template or "")
    assert backend.model.metadata["llama.block_count"] == "2"
    assert "1 thread" in backend.description
    assert "q8_0" in backend.description
    backend.close()


def test_one_sequence_is_no_longer_than_the_model_was_trained_for(tiny: Path) -> None:
    """Cells beyond the trained length are for other sequences."""
    backend = load(tiny, n_ctx=4096)
    assert (backend.limits.n_ctx, backend.limits.n_ctx_seq) == (4096, 2048)
    backend.close()


def test_a_context_is_refused_that_has_no_room_for_its_scores(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without flash attention they add as much to the cells: 4 heads, a batch of 32."""
    monkeypatch.setattr("uma_trio.backend._llama_options.available_memory", lambda: 150 << 10)
    without_gpu = evolve(system_info(), devices=())
    monkeypatch.setattr("uma_trio.backend.llama.system_info", lambda: without_gpu)
    with pytest.raises(ModelError, match="scores of attention"):
        load(tiny, flash_attention="off")
    load(tiny, flash_attention="on").close()
    left_to_llama = load(tiny)
    assert not left_to_llama.limits.whole_cache, "by itself nothing is refused for their sake"
    left_to_llama.close()


def test_the_weights_that_a_tick_reads_are_those_of_the_file(tmp_path: Path) -> None:
    """A mixture's two parts make the whole; an expert is its share of the stacked matrices."""
    shape = PRESETS["moe-tiny"]
    backend = load(write_model(tmp_path / "moe.gguf", shape))
    model = backend.model
    assert (model.experts, model.experts_used) == (4, 2)
    assert model.expert_bytes == shape.layers * 3 * shape.width * shape.ffn * 2  # F16
    assert model.weight_bytes + 4 * model.expert_bytes == model.size_bytes
    backend.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is mapped")
def test_pages_that_were_only_read_to_load_are_given_back(tmp_path: Path) -> None:
    """A model that was just loaded holds none of its file; what a decode reads comes back."""
    path = write_model(tmp_path / "mapped.gguf")
    backend = load(path)
    assert resident_kib(path) == 0
    backend.batch.token[0], backend.batch.want[0] = 97, 1
    assert backend.decode(1) == DecodeStatus.OK
    assert resident_kib(path) > 0
    backend.close()


@pytest.mark.parametrize(
    "kv_type", ["f32", "f16", "bf16", "q8_0", "q5_1", "q4_0", "iq4_nl", "k=q8_0,v=f16"]
)
def test_every_kv_type_computes(tiny: Path, kv_type: str) -> None:
    """Quantised caches work too, on flash attention."""
    backend = load(tiny, kv_type=kv_type)
    backend.batch.token[0], backend.batch.want[0] = 97, 1
    assert backend.decode(1) == DecodeStatus.OK
    assert backend.logits(1).shape == (1, 260)
    backend.close()


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, False),
        ({"flash_attention": "on"}, False),
        ({"flash_attention": "off"}, True),
        ({"kv_type": "q8_0"}, False),
    ],
    ids=str,
)
def test_flash_attention_is_used_unless_it_is_off(
    tiny: Path, options: dict[str, object], left_out: bool
) -> None:
    """The description says so: it is a part of the name of the cost file, and costs differ."""
    backend = load(tiny, **options)
    if "CPU" in backend.description:
        assert ("without flash attention" in backend.description) == left_out
        assert backend.limits.whole_cache == left_out
    backend.close()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kv_type": "q6"}, "q8_0"),
        ({"n_slots": 0}, "--parallel"),
        ({"n_slots": 257}, "--parallel"),
        ({"n_ctx": 0}, "--n-ctx"),
        ({"threads": 0}, "--threads"),
        ({"n_ctx": 1 << 31}, "try --n-ctx"),
        ({"flash_attention": "off", "kv_type": "q8_0"}, "take --kv-type f16"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_one_sentence(
    tiny: Path, options: dict[str, object], word: str
) -> None:
    """Bad sizes are refused by name before llama.cpp would end the process over them."""
    with pytest.raises(ModelError, match=word):
        load(tiny, **options)


def test_more_rows_than_there_are_is_invalid(tiny: Path) -> None:
    """llama.cpp would end the process; we say that the batch is wrong."""
    backend = load(tiny)
    n = backend.limits.n_rows + 1
    for i in range(n):
        backend.batch.token[i], backend.batch.pos[i], backend.batch.want[i] = 97, i, 1
    assert backend.decode(n) == DecodeStatus.INVALID
    assert backend.kv_length(0) == 0
    backend.close()


def test_rows_that_are_not_there_cannot_be_read(tiny: Path) -> None:
    """Logits of an earlier or failed decode are not mistaken for new ones."""
    backend = load(tiny)
    with pytest.raises(ValueError, match="rows"):
        backend.logits(1)
    backend.batch.token[0], backend.batch.want[0] = 97, 1
    backend.decode(1)
    assert backend.decode(1) == DecodeStatus.INVALID
    with pytest.raises(ValueError, match="rows"):
        backend.logits(1)
    backend.close()


@pytest.mark.parametrize("slot", [-1, 2, 256])
def test_a_slot_that_does_not_exist_raises(tiny: Path, slot: int) -> None:
    """llama.cpp would end the process."""
    backend = load(tiny)
    with pytest.raises(IndexError):
        backend.kv_length(slot)
    with pytest.raises(IndexError):
        backend.kv_remove(slot)
    backend.close()


def test_a_closed_backend_is_dead_but_its_vocabulary_is_not(tiny: Path) -> None:
    """A helper thread may still be tokenising while the daemon stops."""
    backend = load(tiny)
    vocabulary = backend.vocabulary
    backend.close()
    with pytest.raises(BackendDied):
        backend.decode(1)
    with pytest.raises(BackendDied):
        backend.kv_length(0)
    del backend
    assert len(vocabulary.tokenize("abc", add_special=False, parse_special=False)) == 3


def test_an_interrupted_decode_is_nothing_to_warn_of(tiny: Path) -> None:
    """llama.cpp calls it an error in four lines; it is what we asked for."""
    lines: list[str] = []
    backend = load(tiny, log=lambda _, line: lines.append(line))
    interrupt = backend.arm()
    if interrupt is None:
        pytest.skip("this machine's hardware does not ask whether to go on")
    interrupt()
    backend.batch.token[0], backend.batch.want[0] = 97, 1
    assert backend.decode(1) == DecodeStatus.ABORTED
    assert lines == []
    backend.close()


def test_a_tick_that_is_given_up_changes_no_token_of_the_bundled_model() -> None:
    """A batch job and the person who interrupted it get the text that they get undisturbed."""

    def told(predicted_s: float) -> list[list[int]]:
        def one_each(state: SchedulerState) -> Plan:
            people = [view for view in state.sequences if view.lane == "interactive"]
            view = (people or state.sequences)[0]
            if view.computed == 64 and len(sinks) == 1:  # it came too late for this plan
                sinks.append(bench.submit("Once upon a time", 12, ignore_eos=True)[1])
            phase = "decode" if view.decoding else "prefill"
            item = PlanItem(view.key, min(view.pending, 64), phase, "in turn")
            return Plan((item,), predicted_s=predicted_s)

        backend = LlamaBackend.load(bundled_model(), n_ctx=1024, n_slots=2, n_batch=64, threads=1)
        if backend.arm() is None:
            pytest.skip("this machine's hardware does not ask whether to go on")
        bench = Bench(backend, one_each)  # type: ignore[arg-type]
        document = "A fox and a lantern. " * 40
        sinks = [bench.submit(document, 12, lane="background", ignore_eos=True)[1]]
        bench.run()
        assert [len(sink.tokens) for sink in sinks] == [12, 12]
        statuses = [tick.status for tick in bench.explain(ticks=100).ticks]
        assert statuses.count(DecodeStatus.ABORTED) == (predicted_s > 0)
        backend.close()
        return [sink.tokens for sink in sinks]

    assert told(predicted_s=1.0) == told(predicted_s=0.0)


def test_on_a_gpu_nothing_can_be_interrupted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the CPU asks whether to go on, so that arming must not promise it."""
    device = _llama_lib.Device("CUDA0", "a GPU", "gpu")
    system = evolve(system_info(), devices=(device,))
    monkeypatch.setattr("uma_trio.backend.llama.system_info", lambda: system)
    backend = load(tiny)
    assert backend.arm() is None
    backend.close()


@pytest.mark.parametrize(
    ("gpu", "blocks", "order"),
    [
        (False, True, ["aside", "decode"] * 2),
        (True, False, ["decode", "aside", "wait"] * 2),
        (True, True, ["decode", "aside", "wait"] * OVER + ["aside", "decode", "wait"]),
    ],
    ids=["a CPU", "a GPU", "a GPU that leaves the work to the CPU"],
)
def test_an_aside_comes_before_most_of_the_time_of_a_decode(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, blocks: bool, order: list[str]
) -> None:
    """It keeps no GPU waiting, and waits for no call of a device that turns out to block."""
    device = _llama_lib.Device("CUDA0", "a GPU", "gpu")
    system = evolve(system_info(), devices=(device,) if gpu else ())
    monkeypatch.setattr("uma_trio.backend.llama.system_info", lambda: system)
    backend = load(tiny)
    seen: list[str] = []
    now = [0.0]

    def timed(name: str, seconds: float, call: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            seen.append(name)
            now[0] += seconds
            return call(*arguments)

        return called

    decode_s, wait_s = (2.0, 1.0) if blocks else (1.0, 2.0)
    monkeypatch.setattr("uma_trio.backend.llama.perf_counter", lambda: now[0])
    monkeypatch.setattr(_llama_lib, "decode", timed("decode", decode_s, _llama_lib.decode))
    monkeypatch.setattr(_llama_lib, "synchronize", timed("wait", wait_s, _llama_lib.synchronize))
    while_computing = timed("aside", 1.5, lambda: None)
    for position in range(order.count("decode")):
        backend.batch.token[0], backend.batch.pos[0] = 97, position
        assert backend.decode(1, while_computing) == DecodeStatus.OK
    assert seen == order
    backend.close()


def test_progress_rises_to_one_and_may_stop_the_loading(tiny: Path) -> None:
    """The bar is fed, and an interrupt in it comes out of `load`."""
    seen: list[float] = []
    load(tiny, progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0

    def stop(_share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(tiny, progress=stop)


def test_warnings_go_to_the_sink_and_nowhere_else(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Information is dropped, warnings come as whole lines, nothing is printed."""
    lines: list[tuple[LogLevel, str]] = []
    backend = load(tiny, log=lambda level, line: lines.append((level, line)))
    lines.clear()
    for level, part in ((2, b"nothing\n"), (3, b"something "), (5, b"odd\n"), (4, b"worse\n")):
        _llama_lib._log._receive(level, part, None)
    assert lines == [("warning", "something odd"), ("error", "worse")]
    backend.close()


@pytest.mark.parametrize(
    "said",
    [
        (
            "load: control-looking token:  32007 '<|end|>' was not control-type; this is probably a bug "
            "in the model. its type will be overridden"
        ),
        "load: special_eos_id is not in special_eog_ids - the tokenizer config may be incorrect",
        (
            "load: special_eog_ids contains both '<|return|>' and '<|call|>', or '<|calls|>' and "
            "'<|flush|>' tokens, removing '<|end|>' token from EOG list"
        ),
        "load: control token: 151660 '<|fim_middle|>' is not marked as EOG",
        "load: '</s>' is a normal token here, removing it from EOG list",
        "load: model vocab missing newline token, using special_pad_id instead",
    ],
)
def test_what_llama_mends_in_a_vocabulary_is_no_warning(said: str) -> None:
    """Nobody can do anything about it."""
    assert _said_through([said, "load: missing pre-tokenizer type, using: 'default'"]) == [
        "load: missing pre-tokenizer type, using: 'default'"
    ]


def _said_through(lines: list[str]) -> list[str]:
    """Return those of llama.cpp's warnings that a sink gets to see."""
    told: list[str] = []
    log = _llama_lib._Log()
    log.sink = lambda _, line: told.append(line)
    for line in lines:
        log._receive(3, f"{line}\n".encode(), None)
    return told


def test_a_context_that_the_model_was_not_trained_for_is_no_warning(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sequence gets no more than the model can do, whatever all together have."""
    lines: list[str] = []
    for n_ctx in (512, 4096):
        load(tiny, n_ctx=n_ctx, log=lambda _, line: lines.append(line)).close()
    assert lines == []
    load(tiny, n_ctx=4096).close()
    assert capfd.readouterr() == ("", "")


def test_an_error_of_llama_cpp_is_an_error_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines keep their level, so that `--log-level warning` shows what went wrong."""

    def speak(*_: object, log: Callable[[LogLevel, str], None], **__: object) -> None:
        log("warning", "odd")
        log("error", "no memory")

    monkeypatch.setattr(LlamaBackend, "load", speak)
    with capture_logs() as lines:
        load_backend(Config(model=bundled_model(), n_ctx=512), None)
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "odd"),
        ("error", "no memory"),
    ]


def test_a_model_that_lacks_a_tensor_gives_llama_cpps_reason(tiny: Path, tmp_path: Path) -> None:
    """What only llama.cpp can know is passed on, in our sentence."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelError, match=r"cannot load .*ffn_up"):
        load(path)


BROKEN = """
import random, sys
from pathlib import Path
from uma_trio.backend.base import ModelError
from uma_trio.backend.llama import LlamaBackend
good, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
head = good.index(b"token_embd.weight") + 1500
rng = random.Random(int(sys.argv[4]))
refused = 0
for round in range(int(sys.argv[5])):
    data = bytearray(good)
    if sys.argv[3] == "cut":
        del data[rng.choice((rng.randrange(head), rng.randrange(len(good)))):]
    else:
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(head)] = rng.randrange(256)
    path.write_bytes(data)
    try:
        backend = LlamaBackend.load(path, n_ctx=256, n_slots=2, threads=1)
        backend.batch.token[0] = 97
        backend.decode(1)
        backend.close()
    except ModelError as error:
        assert str(path) in str(error), error
        refused += 1
print(refused)
"""


@pytest.mark.parametrize(("how", "rounds", "least"), [("cut", 100, 100), ("flip", 150, 75)])
def test_broken_files_never_end_the_process(
    tiny: Path, tmp_path: Path, how: str, rounds: int, least: int
) -> None:
    """Truncated anywhere the file is refused; with flipped bytes it is refused or computes."""
    command = [sys.executable, "-c", BROKEN, tiny, tmp_path / "b.gguf", how, "1", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least


def test_system_info_tells_what_computes() -> None:
    """There is a CPU with its name and features, and a version."""
    info = system_info()
    assert " 0.3." in info.build
    assert info.features["CPU"]
    cpu = next(device for device in info.devices if device.kind == "cpu")
    assert cpu.name
    assert bool(info.gpus) <= info.gpu_offload


def test_features_are_taken_apart_by_backend() -> None:
    """A build for several backends lists each with its own."""
    line = "CUDA : ARCHS = 750,800 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | FMA = 0 | "
    assert parse_features(line) == {
        "CUDA": {"ARCHS": "750,800", "USE_GRAPHS": "1"},
        "CPU": {"AVX2": "1", "FMA": "0"},
    }


@pytest.mark.parametrize(
    ("signature", "wrong"),
    [
        (b"GCC: (Debian 12.2.0-14+deb12u1) 12.2.0", True),
        (b"GCC: (GNU) 11.4.1 20231218", True),
        (b"GCC: (Ubuntu 13.2.0-23ubuntu4) 13.2.0", True),
        (b"GCC: (conda-forge gcc 12.4.0-2) 12.4.0", False),
        (b"GCC: (Ubuntu 13.3.0-6ubuntu2) 13.3.0", False),
        (b"GCC: (Debian 14.2.0-19) 14.2.0", False),
        (b"GCC: (Debian 12.2.0-14) 12.2.0\0Debian clang version 19.1.7", False),
        (b"", False),
    ],
)
def test_a_compiler_that_gets_amx_wrong_is_known_by_its_signature(
    signature: bytes, wrong: bool
) -> None:
    """GCC PR target/114098: the first prompt would be a segmentation fault."""
    assert _llama_lib.gets_amx_wrong(b"\x7fELF" + signature + b"\0") is wrong


def test_a_build_with_broken_amx_does_without(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights stay where AMX does not find them, and nobody is told that it is used."""
    llama = _llama_lib.llama
    loaded, said = [], []
    real = llama.llama_model_load_from_file

    def load_from_file(path: bytes, params: Any) -> object:
        loaded.append(params.use_extra_bufts)
        return real(path, params)

    monkeypatch.setattr(llama, "llama_model_load_from_file", load_from_file)
    for broken in (False, True):
        monkeypatch.setattr(_llama_lib, "amx_is_miscompiled", lambda broken=broken: broken)
        load(tiny, log=lambda _, line: said.append(line)).close()
    assert loaded == [True, False]
    assert ["uma-trio doctor" in line for line in said] == [True]
    features = {"CPU": {"AMX_INT8": _llama_lib.MISCOMPILED, "AVX2": "1"}}
    assert "AMX" not in described(
        evolve(system_info(), features=features, devices=()), Placement(9), 2, "f16"
    )


LONG = {
    "word": "a" * 65_536,
    "dots": "!?." * 21_845,
    "spaces": " " * 65_536 + "x",
    "line ends": "\r\n" * 32_768,
    "digits": "1" * 65_536,
    "words": "ab " * 21_845,
    "han": "漢字" * 10_922,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_a_long_line_does_not_end_the_process(tiny: Path, tmp_path: Path, text: str) -> None:
    """With the patterns of another family, which recurse for each character, in a thread."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"smollm", b"tekken"))
    backend = load(path)
    vocabulary, pieces = backend.vocabulary, backend.vocabulary.pieces()
    backend.close()
    out: list[bytes] = []

    def tokenize() -> None:
        tokens = vocabulary.tokenize(text, add_special=True, parse_special=False)
        out.append(b"".join(pieces[token] for token in tokens))

    thread = threading.Thread(target=tokenize)
    thread.start()
    thread.join()
    assert out == [text.encode()]


@pytest.mark.parametrize("text", [*LONG.values(), "a\n" * 5000, "", "short"], ids=str)
def test_long_lines_are_cut_between_words(text: str) -> None:
    """Joined, the parts are the text; short lines are never cut."""
    parts = cut_long_lines(text)
    assert "".join(parts) == text
    if text.count("\n") == 5000 or len(text) < 1000:
        assert len(parts) <= 1
    assert all(len(line) <= 1000 for part in parts for line in part.split("\n"))
    if text.startswith("ab "):
        assert all(part.startswith(" ab") for part in parts[1:])


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_the_places_where_a_long_line_is_cut_depend_on_what_is_before_them(text: str) -> None:
    """Some of the parts together are cut in the same way, and a text that goes on has the same but for the last."""
    text = text[:9000] + "\n" + text[:4000]
    parts = cut_long_lines(text)
    for first in range(0, len(parts), 3):
        for last in range(first, len(parts), 5):
            assert cut_long_lines("".join(parts[first:last])) == parts[first:last]
    assert cut_long_lines(text + " and more.")[: len(parts) - 1] == parts[:-1]


def test_threads_tokenise_side_by_side(tiny: Path) -> None:
    """The vocabulary is safe from any thread."""
    backend = load(tiny)
    wrong: list[int] = []

    def work(seed: int) -> None:
        said = f"text {seed} " * 200
        want = list(said.encode())
        for _ in range(50):
            tokens = backend.vocabulary.tokenize(said, add_special=False, parse_special=False)
            if tokens.tolist() != want:
                wrong.append(seed)

    run: Callable[[int], threading.Thread] = lambda seed: threading.Thread(  # noqa: E731
        target=work, args=(seed,)
    )
    threads = [run(seed) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    backend.close()
