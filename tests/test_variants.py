"""Which adapters a request asks for, and how adapters are declared."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from uma_trio.app.build import Builder
from uma_trio.backend.base import Adapter, ModelError
from uma_trio.config.adapters import AdapterSpec, adapter_spec
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.config.settings import load
from uma_trio.engine.outlet import Outlet
from uma_trio.machine.background import BackgroundScheduler
from uma_trio.machine.bell import Bell
from uma_trio.models.model import Model
from uma_trio.models.names import adapters_by_list, adapters_by_name, find_by_name, variant_suffix
from uma_trio.models.refusal import Refusal
from uma_trio.observe.figures import EncodingFigures
from uma_trio.policy.deadline import deadline

KNOWN = (Adapter("polite", Path("p.gguf"), 1.0), Adapter("terse", Path("t.gguf"), 0.5))
POLITE, TERSE = KNOWN


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("polite.gguf", AdapterSpec("polite", Path("polite.gguf"), 1.0)),
        ("a=dir/p.gguf", AdapterSpec("a", Path("dir/p.gguf"), 1.0)),
        ("a=p.gguf:0.5", AdapterSpec("a", Path("p.gguf"), 0.5)),
        ("p.gguf:-2", AdapterSpec("p", Path("p.gguf"), -2.0)),
        ("a=dir:x/p.gguf", AdapterSpec("a", Path("dir:x/p.gguf"), 1.0)),
    ],
    ids=str,
)
def test_an_adapter_has_a_name_a_file_and_a_scale(text: str, spec: AdapterSpec) -> None:
    """The name is that of the file, and the scale 1, where they are not given."""
    assert adapter_spec(text) == spec


@pytest.mark.parametrize("text", ["", "a=", "a b=p.gguf", "p.gguf:1000", "a:b=p.gguf", "=p.gguf:"])
def test_what_is_no_adapter_is_refused(text: str) -> None:
    """With how one is written."""
    with pytest.raises(ConfigError, match="FILE"):
        load({"lora": (text,)}, {})


def test_two_adapters_of_one_name_are_refused() -> None:
    """A request could mean either."""
    with pytest.raises(ConfigError, match="twice"):
        load({"lora": ("a=x.gguf", "a=y.gguf")}, {})


def test_each_model_has_its_own_adapters(tmp_path: Path) -> None:
    """Those of the command line are of the model that it names."""
    file = tmp_path / "settings.yaml"
    file.write_text(
        "models:\n"
        "  chat: {model: a.gguf, lora: {polite: p.gguf, terse: 't.gguf:0.5'}}\n"
        "  code: {model: b.gguf}\n"
    )
    config = load({"config": file, "model": Path("m.gguf"), "lora": ("x.gguf",)}, {})
    assert [each.lora for each in config.each()] == [
        ("x.gguf",),
        ("polite=p.gguf", "terse=t.gguf:0.5"),
        (),
    ]


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("polite", [("polite", 1.0)]),
        ("terse", [("terse", 0.5)]),
        ("terse=2", [("terse", 2.0)]),
        ("terse+polite", [("polite", 1.0), ("terse", 0.5)]),
        ("terse=0", []),
        ("polite=0.123456", [("polite", 0.12)]),
    ],
    ids=str,
)
def test_a_name_says_adapters_and_scales(text: str, scales: list[tuple[str, float]]) -> None:
    """In the order of their declaration; one with the scale 0 is none."""
    assert [(each.name, each.scale) for each in adapters_by_name(text, KNOWN)] == scales


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ([{"id": 1, "scale": 1}, {"id": 0}], "polite+terse=1"),
        ([{"id": 1}], "terse"),
        ([{"name": "polite", "scale": 0.25}], "polite=0.25"),
        ([{"id": 0, "scale": 0.0}], ""),
        ([], ""),
    ],
    ids=str,
)
def test_a_list_says_adapters_and_scales(asked: list[dict[str, Any]], name: str) -> None:
    """As llama-server has it: what is not in it is not used. The name of a variant names the same again."""
    found = adapters_by_list(asked, KNOWN)
    assert variant_suffix(found, KNOWN) == name
    assert not name or adapters_by_name(name, KNOWN) == found


@pytest.mark.parametrize(
    "text", ["polit", "polite=x", "polite=nan", "polite=101", "", "polite++terse"]
)
def test_a_name_that_says_nothing_is_refused(text: str) -> None:
    """As that of a model that is not there."""
    with pytest.raises(Refusal) as refused:
        adapters_by_name(text, KNOWN)
    assert refused.value.code == "E_MODEL_002"


@pytest.mark.parametrize(
    "asked",
    [
        [{"id": 2}],
        [{"id": True}],
        [{"scale": 1}],
        [{"id": 0, "scale": "1"}],
        [{"id": 0, "scale": 1e9}],
        [{"id": 0, "scale": 10**309}],
    ],
    ids=str,
)
def test_a_list_that_says_nothing_is_refused(asked: list[dict[str, Any]]) -> None:
    """It names the field."""
    with pytest.raises(Refusal) as refused:
        adapters_by_list(asked, KNOWN)
    assert refused.value.field == "lora"


def model(
    configured: tuple[str, ...], files: tuple[str, ...], kind: Any = "text", **more: Any
) -> Model:
    """Return a model with these names."""
    return Model(Config(alias=configured, **more), kind, file_names=files)


THIEF = model(("thief", "chat:terse"), ("chat", "base", "chat:polite", "v"))
CHAT = model(("chat",), ("base",), lora=("polite=p.gguf", "terse=t.gguf"))
VECTORS = model(("v",), ("base", "chat"), "vectors")
VARIANT = model((), ())


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("thief", None, THIEF),
        ("chat", None, CHAT),
        ("chat:latest", None, CHAT),
        ("chat", "vectors", CHAT),
        ("v", "text", VECTORS),
        ("base", None, THIEF),
        ("base", "vectors", VECTORS),
        ("base:latest", "vectors", VECTORS),
        ("chat:polite", None, VARIANT),
        ("chat:terse", None, THIEF),
        ("nobody", None, None),
    ],
)
def test_names_of_the_configuration_win_over_names_of_files(
    name: str, kind: Any, found: Model | None
) -> None:
    """Those of variants included: the name in a file is the last that counts."""

    def variant(text: str, base: Model) -> Model:
        assert base is CHAT
        adapters_by_name(text, base.known_adapters)
        return VARIANT

    assert find_by_name(name, (THIEF, CHAT, VECTORS), kind, variant) is found
    with pytest.raises(Refusal, match="no adapter is called rude"):
        find_by_name("chat:rude", (THIEF, CHAT, VECTORS), kind, variant)


def test_the_name_of_a_file_stays_a_name(tmp_path: Path) -> None:
    """The first name of the configuration is shown; requests may use all of them, and those of other models are not taken."""
    named = model(("a", "b"), ("file",))
    assert (named.names, named.configured_names) == (("a", "b", "file"), ("a", "b"))
    assert model((), ("file",)).names == ("file",)


async def test_a_variant_is_never_loaded_without_its_adapters() -> None:
    """Its base may die after a variant was found to have room: then it is not loaded at all."""
    held, base = ExitStack(), Model(Config(alias=("base",)))
    variant = Model(evolve(base.config, is_variant=True), base=base, adapters=(POLITE,))
    builder = Builder(
        deadline,
        Bell(),
        Outlet(lambda call: call()),
        float,
        BackgroundScheduler(float),
        EncodingFigures(),
    )
    with held, pytest.raises(ModelError, match="base, which it is a variant of, has stopped"):
        await builder.build(variant, held, None)
