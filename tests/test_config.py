"""Settings: where they come from, which wins, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from attrs.exceptions import FrozenInstanceError

from uma_trio.app.build import engine_settings
from uma_trio.backend.kv_types import KV_TYPES
from uma_trio.config.option import ConfigError, show
from uma_trio.config.options import ESSENTIAL, OPTIONS, Config, grouped, replace
from uma_trio.config.settings import RESERVED, SECTIONS, known_env, load, restated
from uma_trio.models.files import chosen_policy
from uma_trio.policy.state import Contract
from uma_trio_sim.fake import FakeBackend

TRACKER = """
model: "/models/qwen-coder-30b-q8.gguf"
ipc:
  uds_path: "/tmp/uma.sock"
  backlog: 64
limits:
  max_sessions: 32
  max_prompt_bytes: 65536
  max_tokens: 2048
scheduler:
  # batch budget adapts automatically
  tick_budget_ms: 30
  start_target_tokens: 32
metrics:
  tick_interval_ms: 1000
"""
BRIEF = """
latency_cap: 1.20
qos:
  interactive: {priority: 10}
  background:  {priority: 1}
scheduler:
  max_merge: 4
  preempt_at_token: true
logging:
  scorecard_interval_s: 5
"""


def from_yaml(tmp_path: Path, text: str, **flags: object) -> Config:
    """Load a configuration from a YAML file alone."""
    path = tmp_path / "uma.yaml"
    path.write_text(text, encoding="utf-8")
    return load({"config": str(path), **flags}, {})


def refusal(flags: dict[str, object], env: dict[str, str] | None = None) -> str:
    """Return what is said about settings that are refused."""
    with pytest.raises(ConfigError) as caught:
        load(flags, env or {})
    return str(caught.value)


def test_without_anything_the_defaults_of_the_design_hold() -> None:
    """A daemon that is told nothing runs as the documentation says."""
    config = load({}, {})
    assert config == Config()
    assert (config.n_ctx, config.parallel, config.max_sessions) == (None, None, 32)
    assert config.socket.parts == ("/", "tmp", "uma.sock")
    assert config.model is None


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    """The nearer a setting was typed, the more it counts."""
    path = tmp_path / "uma.yaml"
    path.write_text("n_ctx: 111\nparallel: 3\nthreads: 2\n", encoding="utf-8")
    env = {"UMA_CONFIG": str(path), "UMA_N_CTX": "222", "UMA_PARALLEL": "5"}
    config = load({"n_ctx": "333"}, env)
    assert (config.n_ctx, config.parallel, config.threads) == (333, 5, 2)


def test_the_trackers_yaml_is_read_as_it_stands(tmp_path: Path) -> None:
    """The layout of the first seed works, and its limit on tokens is a limit."""
    config = from_yaml(tmp_path, TRACKER)
    assert config.model == Path("/models/qwen-coder-30b-q8.gguf")
    assert (config.max_sessions, config.max_prompt_bytes) == (32, 65536)
    assert config.max_tokens_cap == 2048
    assert config.tick_budget_ms == 30


def test_the_scorecard_is_set_by_the_keys_of_both_layouts(tmp_path: Path) -> None:
    """The brief's interval means what it says there; the tracker's tick is accepted at its value."""
    text = (
        "metrics: {tick_interval_ms: 1000}\nscorecard: c.csv\nlogging: {scorecard_interval_s: 30}"
    )
    config = from_yaml(tmp_path, text)
    assert config.scorecard == Path("c.csv")
    assert config.scorecard_interval_s == 30


def test_the_briefs_yaml_is_read_at_its_defaults(tmp_path: Path) -> None:
    """The layout of the second seed works, as far as it asks for what is there."""
    assert from_yaml(tmp_path, BRIEF) == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n_ctxx: 3", "no such key n_ctxx (did you mean n_ctx?)"),
        ("{policy: contract,-stairs}", "a text with a comma needs quotes"),
        ("http_port: 80", "no such key http_port (did you mean http?)"),
        ("limits: {max_session: 2}", "did you mean limits.max_sessions?"),
        ("n_ctx: true", "uma.yaml: n_ctx: true is not a whole number; it takes 16 to 16777216"),
        ("n_ctx: 1.5", "n_ctx: 1.5 is not a whole number"),
        ("n_ctx: {most: 3}", "n_ctx takes one value, and no settings below it"),
        ("limits: {max_sessions: many}", "uma.yaml: limits.max_sessions: 'many' is not"),
        ("qos: {interactive: {priority: 0}}", "uma.yaml: qos.interactive.priority: 0 is out of"),
        ("qos: {interactive: 10}", "qos.interactive takes settings (priority), and not 10"),
        ("qos: 5", "qos takes settings (background.priority, interactive.priority), and not 5"),
        (
            "qos: {background: {priority: 2}}",
            "qos.interactive.priority is relative to this value; omit it",
        ),
        (
            "metrics: {tick_interval_ms: 250}",
            "scorecard is updated every second; omit it or use 1",
        ),
        ("scheduler: {start_target_tokens: 8}", "start_target_tokens: 8 is not available"),
        ("scheduler: {preempt_at_token: false}", "scheduler.preempt_at_token: false is not"),
        ("interactive_priority: 2000000", "2000000 is out of range, the most is 1000000"),
        ("tick_budget_ms: .nan", "is not a number"),
        ("model: 3", "is not a path"),
        ("- 3", "expected settings"),
        ("a: [", "line 1: "),
        ("n_ctx: 64\nn_ctx: 128\n", "n_ctx is in lines 1 and 2; keep one of them"),
        ("limits: {max_tokens: 1, max_tokens: 1}", "max_tokens is in lines 1 and 1"),
        ("limits: &it\n  more: *it", "a section contains itself"),
        ("limits: 5", "limits takes settings (max_prompt_bytes, max_sessions, "),
        ("a: [", "is not YAML"),
        ("bmt_budget_gbps: -1", "it must be more than 0"),
        ("max_sessions: 2\nlimits: {max_sessions: 3}", "uma.yaml: max_sessions and limits.max_s"),
    ],
)
def test_a_wrong_yaml_file_is_refused_with_what_to_do(tmp_path: Path, text: str, said: str) -> None:
    """Whoever wrote the file learns which key it is and what it should be."""
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, text)
    assert said in str(caught.value)


def test_an_empty_section_or_file_changes_nothing(tmp_path: Path) -> None:
    """A file whose lines are all commented out is a file with no settings."""
    empty = "limits:\nscheduler:\nqos:\n  interactive:\n"
    assert from_yaml(tmp_path, "") == from_yaml(tmp_path, empty) == Config()


@pytest.mark.parametrize("other", ["ticks", "./ticks", "link", "hard link"])
def test_two_settings_cannot_name_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A trace that goes over the scorecard, the model or the settings would ruin both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ticks").write_text("", encoding="utf-8")
    (tmp_path / "link").symlink_to("ticks")
    (tmp_path / "hard link").hardlink_to("ticks")
    said = refusal({"trace": "ticks", "scorecard": other})
    assert said.startswith("--trace and --scorecard name the same file")
    for first in ("model", "socket", "config"):
        assert f"--{first} and --trace" in refusal({first: "ticks", "trace": other})
    assert "--trace and --scorecard" in refusal(
        {"trace": "not/there", "scorecard": "not/../not/there"}
    )
    assert load({"trace": "ticks", "scorecard": "other.csv"}, {}).trace == Path("ticks")


def test_a_setting_knows_where_it_was_written(tmp_path: Path) -> None:
    """What is found out later is told in the user's own words: the flag, the variable, the key."""
    config = from_yaml(tmp_path, "trace: ticks", policy="luck")
    assert config.source("trace") == f"{tmp_path / 'uma.yaml'}: trace"
    assert config.source("policy") == "--policy"
    assert load({}, {"UMA_SOCK": "s"}).source("socket") == "UMA_SOCK"
    with pytest.raises(ConfigError, match=r"^--policy luck: no policy is called 'luck'"):
        chosen_policy(config)


def test_settings_are_stated_again_as_flags_that_mean_the_same(tmp_path: Path) -> None:
    """Those that were given, wherever they were; a path is whole; what is no single text is left out."""
    file = tmp_path / "c.yaml"
    file.write_text("parallel: 3\nprefix_ram: 1GiB\nmax_queue: 9\nmodel_dir: [a, b]\n", "utf-8")
    env = {"UMA_HTTP": "8080", "UMA_SOCK": str(tmp_path / "s")}
    config = load({"config": str(file), "latency_cap": "1.5", "mlock": True}, env=env)
    again = restated(config)
    assert again["prefix_ram"] == "1073741824"
    assert "model_dir" not in again
    assert attrs.evolve(config, model_dir=()) == load(again, env={})
    (tmp_path / "models").mkdir()
    one = load({"model_dir": (str(tmp_path / "models"),)}, env={})
    assert restated(one) == {"model_dir": str(tmp_path / "models")}
    assert restated(load({}, env={"HOME": str(tmp_path)})) == {}


def test_what_is_promised_is_what_the_options_say() -> None:
    """Each of them, and none in the place of another."""
    promised = Contract(
        latency_cap=1.5,
        pause_cap=3.0,
        reading_pace_s=0.05,
        background_floor=0.1,
        newcomer_tokens=256,
        interactive_weight=8.0,
    )
    flags = {
        "policy": "baseline",  # which measures nothing first
        "latency_cap": "1.5",
        "pause_cap": "3",
        "reading_pace": "50",
        "background_floor": "0.1",
        "interactive_prompt": "256",
        "interactive_priority": "8",
    }
    assert engine_settings(load(flags, {}), FakeBackend()).contract == promised


def test_bounds_are_numbers_as_they_are_typed() -> None:
    """No exponent and no comma, wherever they are shown."""
    bounds = {item.flag: item.bounds for item in OPTIONS}
    assert bounds["--n-ctx"] == "16 to 16777216 tokens"
    assert bounds["--interactive-priority"] == "more than 0, to 1000000"
    assert bounds["--bmt-budget"] == "more than 0 GB/s"
    assert bounds["--trace"] == ""
    assert [show(n) for n in (2e6, 0.05, 1e-7, 1.2)] == ["2000000", "0.05", "0.0000001", "1.2"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"n_ctx": "3"}, "--n-ctx: 3 is out of range, the least is 16"),
        ({"parallel": "257"}, "the most is 256"),
        ({"idle_timeout": "0"}, "it must be more than 0"),
        ({"drain": "soon"}, "is not a duration (300, 300s, 5m, 500ms)"),
        ({"kv_type": "q6"}, "q6 exists for weights only"),
        (
            {"kv_type": "f17"},
            "is not a KV cache type: there is no KV type 'f17' (did you mean f16?)",
        ),
        ({"log_level": "loud"}, "is not one of debug, info, warning, error"),
        ({"config": "/nowhere/at/all.yaml"}, "No such file or directory"),
        ({"http": "on"}, "PORT, HOST:PORT or unix:PATH"),
        ({"latency_cap": "0.9"}, "the least is 1.01"),
        ({"bmt_budget": "fast"}, "is not a number"),
        ({"bmt_budget": "320Gbps"}, "is not a number of bytes, but of bits"),
    ],
)
def test_a_wrong_flag_is_refused_with_its_bounds(flags: dict[str, object], said: str) -> None:
    """The message names the flag, the value and what would be right."""
    assert said in refusal(flags)


def test_a_misspelt_variable_is_refused_and_a_strangers_is_not() -> None:
    """UMA_SOCKTE is misspelt; UMA_HOME belongs to another program; an older name has a new one."""
    assert "did you mean UMA_SOCK" in refusal({}, {"UMA_SOCKTE": "uma.sock"})
    assert "did you mean UMA_PARALLEL?" in refusal({}, {"UMA_N_SEQ": "3"})
    assert load({}, {"UMA_HOME_OF_OTHERS": "1"}) == Config()


def test_a_file_that_is_not_there_is_told_by_who_named_it() -> None:
    """A flag that nobody typed would be looked for in vain."""
    assert refusal({}, {"UMA_CONFIG": "/no/x.yaml"}).startswith("UMA_CONFIG /no/x.yaml: No such")
    assert refusal({"config": "/no/x.yaml"}).startswith("--config /no/x.yaml: No such")


def test_an_empty_variable_is_not_set() -> None:
    """Shells export empty variables; they mean nothing."""
    assert load({}, {"UMA_MODEL": "", "UMA_N_CTX": ""}) == Config()


@pytest.mark.parametrize(
    ("written", "seconds"), [("300", 300), ("300s", 300), ("5m", 300), ("500ms", 0.5), ("1h", 3600)]
)
def test_durations_take_units(written: str, seconds: float) -> None:
    """A minute may be written as one."""
    assert load({"drain": written}, {}).drain_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("written", "n_bytes"),
    [("0", 0), ("1000", 1000), ("512MiB", 512 << 20), ("2 G", 2 << 30), ("1.5gb", 3 << 29)],
)
def test_sizes_take_units(written: str, n_bytes: int) -> None:
    """Powers of 1,024, however they are spelt; without a unit it is bytes."""
    assert load({"prefix_ram": written}, {}).prefix_ram == n_bytes


@pytest.mark.parametrize("written", ["lots", "5TB", "GiB", "1..5M"])
def test_what_is_no_size_is_refused(written: str) -> None:
    """With how one looks."""
    assert "a number of bytes, such as 512MiB" in refusal({"prefix_ram": written})


@pytest.mark.parametrize("kv_type", [*KV_TYPES, "q8", "Q8_0"])
def test_every_kv_type_of_llama_cpp_is_taken(kv_type: str) -> None:
    """What llama.cpp offers can be asked for, and the seeds' q8 is its q8_0."""
    expected = "q8_0" if kv_type.startswith(("q8", "Q8")) else kv_type
    assert load({"kv_type": kv_type}, {}).kv_type == expected


def test_the_debug_switch_of_the_seeds_sets_the_log_level() -> None:
    """UMA_DEBUG=1 makes the log talkative, unless the level itself is given; 0 does nothing."""
    assert load({}, {"UMA_DEBUG": "1"}).log_level == "debug"
    assert load({}, {"UMA_DEBUG": "0"}).log_level == "info"
    assert load({}, {"UMA_DEBUG": "1", "UMA_LOG_LEVEL": "ERR"}).log_level == "error"


def test_a_lower_cap_lowers_what_a_request_gets_by_default() -> None:
    """With --max-tokens-cap 100 nobody gets 512."""
    assert load({"max_tokens_cap": "100"}, {}).max_tokens == 100


def test_auto_means_the_default_where_nothing_is_a_value() -> None:
    """What can be left to the daemon can also be left to it in words."""
    assert load({"threads": "auto"}, {}).threads is None


def test_later_options_are_taken_at_their_default() -> None:
    """A command line written for a later version works as long as it asks for what is there."""
    flags = {item.key: item.accepts[0] for item in RESERVED if item.flag}
    assert load(flags, {"UMA_BMT_BUDGET": "probed"}) == Config()


def test_nothing_is_declared_twice() -> None:
    """A flag, a variable and a key mean one thing."""
    flags = [item.flag for item in OPTIONS] + [item.flag for item in RESERVED if item.flag]
    keys = [*(item.key for item in OPTIONS), *SECTIONS, *(item.key for item in RESERVED)]
    for names in (flags, known_env(), keys):
        assert len(names) == len(set(names))


def test_a_configuration_cannot_be_changed_but_replaced_within_bounds() -> None:
    """Who holds a configuration can rely on it."""
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.n_ctx = 3  # type: ignore[misc]
    assert replace(config, n_ctx=64).n_ctx == 64
    with pytest.raises(ConfigError):
        replace(config, n_ctx=3)


def test_describe_says_everything_in_words() -> None:
    """A bug report shows each setting, and a default by its meaning."""
    described = Config().describe()
    assert described["model"] == "the bundled model"
    assert described["mmap"] == "on"
    assert len(described) == len(OPTIONS)


def test_every_option_is_under_one_heading() -> None:
    """The help shows them by heading; one without would not be shown."""
    shown = [item.name for items in grouped().values() for item in items]
    assert sorted(shown) == sorted(item.name for item in OPTIONS)
    assert {*shown} >= ESSENTIAL


def test_every_option_has_a_variable_of_its_name() -> None:
    """The socket and the level have an older one, too, which the newer one precedes."""
    assert all(item.env[0] == f"UMA_{item.key.upper()}" for item in OPTIONS)
    assert load({}, {"UMA_HTTP_STRICT": "1", "UMA_MODEL_DIR": "/m"}).http_strict
    both = {"UMA_SOCKET": "/a", "UMA_SOCK": "/b"}
    assert load({}, both).socket == Path("/a")
    assert load({}, {"UMA_SOCK": "/b"}).socket == Path("/b")


@pytest.mark.parametrize(
    "flags",
    [{"alias": ("a", "b")}, {"alias": "a, b"}, {"alias": ("a", "b,a")}],
    ids=["repeated", "with commas", "twice"],
)
def test_a_model_may_have_several_names(flags: dict[str, object], tmp_path: Path) -> None:
    """By flags, or as a list in YAML."""
    assert load(flags, {}).alias == ("a", "b")
    file = tmp_path / "c.yaml"
    for text in ("alias: [a, b]", "alias: a, b"):
        file.write_text(text)
        assert load({"config": str(file)}, {}).alias == ("a", "b")


@pytest.mark.parametrize("name", ["", "a,,b", "a\nb", "x" * 257])
def test_a_name_that_no_request_could_have_is_refused(name: str) -> None:
    """With what it should be."""
    with pytest.raises(ConfigError, match="a name of 1 to 256 printable characters"):
        load({"alias": name}, {})
