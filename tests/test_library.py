"""The models on a machine: fetched whole or not at all, found where other programs keep them, named."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hub_mirror import COMMIT, Mirror, mirror
from huggingface_hub import constants, file_download

from uma_trio.backend.base import ModelError
from uma_trio.backend.needs import Estimate, Needs
from uma_trio.cli.models import files_to_remove, list_models, remove, rows_of, show
from uma_trio.cli.models import models as models_verb
from uma_trio.cli.output import Trouble
from uma_trio.cli.pull import pull
from uma_trio.config.settings import load
from uma_trio.library import hub
from uma_trio.library.hub import HubFile, select
from uma_trio.library.names import (
    PullFailed,
    Reference,
    is_model,
    quant_of,
    reference,
    stem_of,
)
from uma_trio.library.stores import Found, NoSuchModel, model_file, models_here
from uma_trio.models import bundled_model
from uma_trio.models.files import model_path

REPO = "owner/tiny-GGUF"
NAME = "tiny-Q4_K_M.gguf"


def noise(n: int, seed: int = 1) -> bytes:
    """Return bytes like those of a model."""
    return b"GGUF" + random.Random(seed).randbytes(n - 4)


@pytest.fixture
def there() -> Iterator[Mirror]:
    """A repository with a model of 3 MB in two quantisations."""
    files = {NAME: noise(3_000_000), "tiny-Q8_0.gguf": noise(5000, 2), "README.md": b"read me"}
    with mirror(files) as served:
        yield served


@pytest.fixture
def home(tmp_path: Path, there: Mirror, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, in which commands look. Nothing is waited for between two attempts."""
    for name in ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CACHE_HOME", "OLLAMA_MODELS", "XDG_CONFIG_HOME", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UMA_SOCK", str(tmp_path / "none"))
    endpoint_is(there.url, monkeypatch)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    return tmp_path


def endpoint_is(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_ENDPOINT, which the library reads when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


def fetch(there: Mirror, cache: Path, quant: str = "") -> Path:
    """Download as `pull` does."""
    asked = Reference(REPO, quant)
    listing = hub.list_files(asked)
    selection = hub.select(listing.files, quant)
    return hub.download(asked, listing.commit, selection, cache, lambda *_: None)


def listed(cache: Path) -> list[str]:
    """Return the files that programs would find."""
    return sorted(path.name for path in cache.rglob("snapshots/*/**/*") if not path.is_dir())


# --- downloading ---


def test_a_model_arrives_whole_in_the_hubs_own_layout(there: Mirror, home: Path) -> None:
    """Every program that reads this cache finds it."""
    path = fetch(there, home)
    assert path.read_bytes() == there.files[NAME]
    folder = home / "models--owner--tiny-GGUF"
    assert path == folder / "snapshots" / COMMIT / NAME
    assert path.resolve() == folder / "blobs" / there.digest(NAME)
    assert (folder / "refs" / "main").read_text() == COMMIT


def test_what_is_there_is_not_downloaded_again(there: Mirror, home: Path) -> None:
    """The second pull asks for no file."""
    fetch(there, home)
    before = len(there.fetched)
    fetch(there, home)
    assert len(there.fetched) == before


def test_a_download_that_is_cut_resumes(there: Mirror, home: Path) -> None:
    """Cut twice, it asks for the rest twice."""
    there.cuts = [1_200_000, 700_000]
    assert fetch(there, home).read_bytes() == there.files[NAME]
    assert there.ranges == ["bytes=1200000-", "bytes=1900000-"]


def test_a_server_that_does_not_resume_is_asked_from_the_beginning(
    there: Mirror, home: Path
) -> None:
    """Its answer to a range is the whole file."""
    there.cuts, there.resumes = [1_000_000], False
    assert fetch(there, home).read_bytes() == there.files[NAME]


def test_a_wrong_byte_is_downloaded_again_once(there: Mirror, home: Path) -> None:
    """The mirror's disk had a bad moment."""
    there.wrong = 1
    assert fetch(there, home).read_bytes() == there.files[NAME]


def test_wrong_bytes_twice_leave_nothing(there: Mirror, home: Path) -> None:
    """Neither a listed file nor a part that a later pull would resume."""
    there.wrong = 2
    with pytest.raises(PullFailed, match="other bytes than the hub lists, twice"):
        fetch(there, home)
    assert listed(home) == []
    assert [path for path in home.rglob("blobs/*") if path.is_file()] == []


def test_a_server_that_is_silent_is_given_up_and_its_bytes_are_kept(
    there: Mirror, home: Path
) -> None:
    """After some attempts in a row without a byte."""
    there.cuts = [1_000_000, *[0] * 10]
    with pytest.raises(PullFailed, match=r"what is present of .* is kept"):
        fetch(there, home)
    assert listed(home) == []
    (kept,) = home.rglob("*.incomplete")
    assert kept.stat().st_size == 1_000_000
    there.cuts = []
    assert fetch(there, home).read_bytes() == there.files[NAME]
    assert there.ranges[-1] == "bytes=1000000-"


def test_the_parts_of_a_split_model_appear_together(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program must load a model that lacks its second part."""
    parts = {f"m-Q8_0-0000{k}-of-00002.gguf": noise(4000, k) for k in (1, 2)}
    with mirror(parts) as there:
        endpoint_is(there.url, monkeypatch)
        there.cuts = [4000, 10, *[0] * 10]
        with pytest.raises(PullFailed):
            fetch(there, home)
        assert listed(home) == []
        there.cuts = []
        assert fetch(there, home).name == "m-Q8_0-00001-of-00002.gguf"
    assert listed(home) == [*parts]


def test_a_redirect_to_another_host_does_not_take_the_token_along(
    there: Mirror, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub keeps its files at others' hosts."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with mirror(there.files) as other:
        there.elsewhere = other.url.replace("127.0.0.1", "localhost")
        fetch(there, home)
        assert {key for *_, key in there.asked} == {"Bearer hf_of_nobody"}
        assert {key for *_, key in other.asked} == {None}


def test_no_room_is_said_before_the_first_byte(
    there: Mirror, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is needed and what there is."""
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(PullFailed, match=r"0\.0 GB are to be downloaded and the disk of .* free"):
        fetch(there, home)
    assert there.fetched == []


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_a_refusal_of_the_hub_is_a_sentence(there: Mirror, home: Path, status: int) -> None:
    """It says what to do."""
    there.status = status
    with pytest.raises(PullFailed, match=r"HF_TOKEN|check the name|try again later"):
        fetch(there, home)


def test_without_a_network_it_says_so(
    there: Mirror, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that HF_HUB_OFFLINE forbids it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PullFailed, match="HF_HUB_OFFLINE is set"):
        fetch(there, home)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    endpoint_is("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(PullFailed, match=r"127\.0\.0\.1:9 cannot be reached: .* HF_ENDPOINT"):
        fetch(there, home)


@pytest.mark.parametrize(
    "entry",
    [
        {"rfilename": "../../x.gguf", "size": 1},
        {"rfilename": "/etc/x.gguf", "size": 1},
        {
            "rfilename": "x.gguf",
            "size": 1,
            "lfs": {"sha256": "../../../etc/passwd", "size": 1, "pointerSize": 1},
        },
        {"rfilename": "x.gguf", "size": -1},
        {"size": 1},
    ],
)
def test_a_list_that_leads_out_of_the_cache_is_refused(
    home: Path, entry: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror is not to be trusted with paths."""
    with mirror({}) as there:
        endpoint_is(there.url, monkeypatch)
        monkeypatch.setattr(there, "siblings", lambda: [entry])
        with pytest.raises(PullFailed):
            fetch(there, home)
    assert list(home.rglob("*.gguf")) == []


def test_pull_that_is_killed_resumes(there: Mirror, home: Path) -> None:
    """The next process asks for the rest alone, and the whole is right."""
    command = [sys.executable, "-m", "uma_trio", "pull", REPO]
    there.files[NAME] = noise(30_000_000)
    there.cuts = [25_000_000]  # two of the library's chunks of 10 MiB are written
    there.cuts += [0] * 50  # after which it waits and tries again, until it is killed
    env = {**os.environ, "HF_ENDPOINT": there.url}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as running:
        while not there.ranges:
            assert running.poll() is None
        running.send_signal(signal.SIGKILL)
    assert listed(home) == []
    there.cuts, there.asked = [], []
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert there.ranges == ["bytes=20971520-"]
    assert f"uma_trio serve --model {REPO}:Q4_K_M" in done.stdout, "as it was called"
    assert listed(home) == [NAME]


def test_a_pull_that_fails_says_so_and_lists_nothing(
    there: Mirror, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit status is that of a refusal."""
    assert pull(f"{REPO}:Q2_K") == 2
    assert "it has no Q2_K; it has Q4_K_M (0.0 GB), Q8_0 (0.0 GB)" in capsys.readouterr().err
    assert listed(home) == []


def test_a_name_that_is_no_repository_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With an example of one."""
    assert pull("qwen2.5:7b") == 2
    assert "write owner/repo or owner/repo:QUANT" in capsys.readouterr().err


# --- selecting ---


def file(path: str, size: int = 1) -> HubFile:
    """A file with some SHA-256."""
    return HubFile(path, size, hashlib.sha256(path.encode()).hexdigest())


def test_without_a_quantisation_the_usual_one_is_taken() -> None:
    """Q4_K_M, else Q8_0, else the first; never a projector."""
    names = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "a-mmproj-m-F16.gguf"]
    assert select(map(file, names), "").quant == "Q4_K_M"
    assert select(map(file, names[::2]), "").quant == "Q8_0"
    assert select(map(file, [names[0], names[3]]), "").quant == "Q2_K"


def test_a_split_model_without_one_of_its_parts_is_refused() -> None:
    """It would be downloaded for nothing."""
    with pytest.raises(PullFailed, match="1 of the 2 parts"):
        select([file("m-Q8_0-00001-of-00002.gguf")], "")


@pytest.mark.parametrize(
    ("typed", "repository", "quant"),
    [
        ("owner/repo", "owner/repo", ""),
        ("owner/repo:Q5_K_M", "owner/repo", "Q5_K_M"),
        ("owner/repo@q5_k_m", "owner/repo", "q5_k_m"),
        ("hf:owner/repo", "owner/repo", ""),
        ("hf://owner/repo", "owner/repo", ""),
        ("hf.co/owner/repo:Q8_0", "owner/repo", "Q8_0"),
        ("huggingface.co/owner/repo:Q8_0", "owner/repo", "Q8_0"),
        ("https://huggingface.co/owner/repo", "owner/repo", ""),
        ("https://hf.co/owner/repo/", "owner/repo", ""),
        ("HTTPS://HuggingFace.co/owner/repo?not-for-all-audiences=true", "owner/repo", ""),
        ("http://www.huggingface.co/owner/repo/tree/main#files", "owner/repo", ""),
        ("https://mirror.test/owner/repo:Q8_0", "owner/repo", "Q8_0"),
        ("https://mirror.test/owner/repo/tree/main?recursive=true", "owner/repo", ""),
    ],
)
def test_a_repository_may_be_named_in_several_ways(typed: str, repository: str, quant: str) -> None:
    """Also by the address of its page, on the hub or on its mirror."""
    found = reference(typed, "https://mirror.test/")
    assert (found.repository, found.quant, found.path) == (repository, quant, "")
    assert found.revision == "main"


@pytest.mark.parametrize(
    ("behind", "path", "revision"),
    [
        ("/blob/main/X-Q8_0.gguf", "X-Q8_0.gguf", "main"),
        ("/resolve/main/X-Q8_0.gguf?download=true", "X-Q8_0.gguf", "main"),
        ("/raw/main/a%20b/X%20Q8_0.gguf", "a b/X Q8_0.gguf", "main"),
        ("/blob/v1.0/Q8_0/X-00001-of-00002.gguf#L1", "Q8_0/X-00001-of-00002.gguf", "v1.0"),
        ("/blob/refs%2Fpr%2F3/X-Q8_0.gguf", "X-Q8_0.gguf", "refs/pr/3"),
        ("/tree/main/Q8_0/", "Q8_0", "main"),
        ("/tree/c0ffee0", "", "c0ffee0"),
        ("?show_file_info=Q8_0%2FX-Q8_0.gguf", "Q8_0/X-Q8_0.gguf", "main"),
        ("/X-Q8_0.gguf", "X-Q8_0.gguf", "main"),
        ("@v1.0/X-Q8_0.gguf", "X-Q8_0.gguf", "v1.0"),
    ],
)
@pytest.mark.parametrize("before", ["https://huggingface.co/", "hf.co/", "hf://", ""])
def test_an_address_may_name_a_file_or_a_folder(
    before: str, behind: str, path: str, revision: str
) -> None:
    """Of any revision, as the hub's own pages link it."""
    found = reference(f"{before}owner/repo{behind}")
    assert (found.repository, found.quant) == ("owner/repo", "")
    assert (found.path, found.revision) == (path, revision)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("https://huggingface.co/datasets/owner/data", "names no repository"),
        ("https://huggingface.co/owner", "names no repository"),
        ("hf.co/", "names no repository"),
        ("https://example.com/owner/repo/X.gguf", "set HF_ENDPOINT"),
        ("https://huggingface.co.example.com/owner/repo", "set HF_ENDPOINT"),
        ("owner/repo/blob/..%2F..%2Fx/X.gguf", "no name of a revision"),
    ],
)
def test_an_address_of_something_else_is_refused(typed: str, said: str) -> None:
    """A dataset, a user, another host."""
    with pytest.raises(PullFailed, match=said):
        reference(typed)


def test_the_file_of_an_address_is_chosen() -> None:
    """All parts of it, and no other quantisation that a repository would give first."""
    names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "big/n-Q8_0.gguf", "big/mmproj-F16.gguf"]
    names += [f"BF16/m-BF16-0000{n}-of-00002.gguf" for n in (1, 2)]

    def chosen(path: str, quant: str = "") -> list[str]:
        found = select(map(file, names), quant, path)
        return [each.path for each in found.files]

    assert chosen("m-Q8_0.gguf") == ["m-Q8_0.gguf"]
    assert chosen("big/n-Q8_0.gguf") == ["big/n-Q8_0.gguf"]
    assert chosen("BF16/m-BF16-00002-of-00002.gguf") == names[4:]
    assert chosen("BF16") == names[4:]
    assert chosen("big") == ["big/n-Q8_0.gguf"]
    for path in ("m-Q2_K.gguf", "big/mmproj-F16.gguf", "BF1"):
        with pytest.raises(PullFailed, match=f"no model at {path}; it has BF16"):
            chosen(path)


def test_pull_fetches_the_file_of_an_address(
    there: Mirror, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says how to serve that very file."""
    name = next(name for name in there.files if "Q8_0" in name)
    assert pull(f"{there.url}/{REPO}/blob/main/{name}?download=true") == 0
    assert listed(home) == [name]
    served = capsys.readouterr().out.replace("\n", "").partition("serve --model ")[2]
    assert Path(served).read_bytes() == there.files[name]


def test_a_revision_is_fetched_as_that(there: Mirror, home: Path) -> None:
    """And does not become the current one."""
    assert pull(f"{there.url}/{REPO}/blob/refs%2Fpr%2F3/{NAME}") == 0
    paths = [path for _, path, _, _ in there.asked]
    assert all("refs/pr/3" in path for path in paths)
    assert sorted(path.name for path in home.rglob("refs/**/*") if path.is_file()) == ["3"]


def test_pull_sends_the_token_of_a_login(there: Mirror, home: Path) -> None:
    """As the hub's own tools do; a refusal says how to log in."""
    kept = home / ".cache" / "huggingface" / "token"
    kept.parent.mkdir(parents=True)
    kept.write_text("hf_login")
    command = [sys.executable, "-m", "uma_trio", "pull", REPO]
    env = {**os.environ, "HF_ENDPOINT": there.url}
    subprocess.run(command, env=env, capture_output=True, check=True)
    assert {key for _, _, _, key in there.asked} == {"Bearer hf_login"}
    there.status = 401
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "hf auth login" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "quant", "stem"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M", "Qwen2.5-7B-Instruct-Q4_K_M"),
        ("m-UD-IQ2_XXS-00001-of-00003.gguf", "UD-IQ2_XXS", "m-UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4", "gpt-oss-20b-mxfp4"),
        ("model.f16.gguf", "F16", "model.f16"),
        ("plain.gguf", "", "plain"),
        ("m-imatrix-Q4_K_M.gguf", "Q4_K_M", "m-imatrix-Q4_K_M"),
        ("M-Q4_K_M-imatrix.gguf", "Q4_K_M", "M-Q4_K_M-imatrix"),
        ("GLM-4.5-MTP-Q8_0.gguf", "Q8_0", "GLM-4.5-MTP-Q8_0"),
        ("m-eagle3-Q8_0.gguf", "Q8_0", "m-eagle3-Q8_0"),
        ("m-mtp-00001-of-00002.gguf", "", "m-mtp"),
    ],
)
def test_names_of_files_say_their_quantisation(name: str, quant: str, stem: str) -> None:
    """As they are published."""
    assert (quant_of(name), stem_of(name)) == (quant, stem)
    assert is_model(name)


@pytest.mark.parametrize(
    "name",
    [
        *("imatrix.gguf", "imatrix_unsloth.gguf", "m-imatrix.gguf", "m.Q8_0.imatrix.gguf"),
        *("m.imatrix.gguf", "mmproj-m-f16.gguf", "m.mmproj-Q8_0.gguf", "mtp-m-Q8_0.gguf"),
        *("eagle3-m.gguf", "m.safetensors", "sub/imatrix.gguf"),
    ],
)
def test_what_lies_beside_a_model_is_none(name: str) -> None:
    """Projectors, modules that draft, and what was measured to quantise."""
    assert not is_model(name)


# --- finding ---


def model_at(path: Path) -> Path:
    """Put a real model there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bundled_model().read_bytes())
    return path


def ollama(store: Path, name: str, tag: str, digest: str | None = None) -> None:
    """Put a model where Ollama would; with another digest its manifest leads there."""
    text = bundled_model().read_bytes()
    own = hashlib.sha256(text).hexdigest()
    blob = store / "blobs" / f"sha256-{own}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(text)
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    kind = "application/vnd.ollama.image.model"
    layer = {"mediaType": kind, "digest": digest or f"sha256:{own}", "size": len(text)}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))


def test_the_stores_of_four_programs_are_read_where_they_lie(tmp_path: Path) -> None:
    """Each model has the name that its program gives it."""
    in_cache(
        tmp_path / ".cache/huggingface/hub",
        COMMIT,
        "tiny-Q4_K_M.gguf",
        bundled_model().read_bytes(),
    )
    ollama(tmp_path / ".ollama" / "models", "qwen2.5", "7b")
    model_at(tmp_path / ".lmstudio" / "models" / "pub" / "repo" / "m-Q8_0.gguf")
    model_at(tmp_path / "mine" / "own.gguf")
    model_at(tmp_path / "mine" / "folder" / "inner-Q5_K_M.gguf")
    (tmp_path / "mine" / "mmproj-own.gguf").write_bytes(b"GGUF")
    found = models_here([tmp_path / "mine"], {}, tmp_path)
    assert [(each.name, each.source) for each in found] == [
        ("own", str(tmp_path / "mine")),
        ("inner-Q5_K_M", str(tmp_path / "mine")),
        ("owner/tiny-GGUF:Q4_K_M", "hf"),
        ("qwen2.5:7b", "ollama"),
        ("pub/repo:Q8_0", "lmstudio"),
    ]
    needs = Needs(4096, own=1 << 30, mapped=0, kv=0, compute=0)
    rows = rows_of(found, load({}, {}), 1 << 40, lambda _: Estimate(needs, (needs,)))
    assert {(row.fits, row.n_ctx_fits) for row in rows} == {(True, 4096)}
    assert rows_of(found[:1], load({}, {}), 1 << 20)[0].fits is False


def in_cache(cache: Path, commit: str, name: str, text: bytes) -> Path:
    """Put a file where the hub's tools would, at the current commit."""
    folder = cache / "models--owner--tiny-GGUF"
    blob = folder / "blobs" / hashlib.sha256(text).hexdigest()
    place = folder / "snapshots" / commit / name
    for path in (blob, place, folder / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(text)
    place.symlink_to(os.path.relpath(blob, place.parent))
    (folder / "refs" / "main").write_text(commit)
    return place


def test_quantisations_of_earlier_commits_are_listed_too(tmp_path: Path) -> None:
    """A pull of another one at a later commit hides none; what both have is of the current one."""
    old = in_cache(tmp_path, "aaa", NAME, b"GGUF1")
    other = in_cache(tmp_path, "aaa", "tiny-Q8_0.gguf", b"GGUF2")
    current = in_cache(tmp_path, "bbb", NAME, b"GGUF3")
    found = models_here([], {"HF_HUB_CACHE": str(tmp_path)}, tmp_path)
    assert [each.path for each in found] == [current, old, other]
    assert [each.name for each in found][::2] == [f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]


def test_one_file_is_listed_once(tmp_path: Path) -> None:
    """Under its first name, however many lead to it."""
    ollama(tmp_path / ".ollama" / "models", "qwen2.5", "7b")
    ollama(tmp_path / ".ollama" / "models", "qwen2.5", "latest")
    assert [each.name for each in models_here([], {}, tmp_path)] == ["qwen2.5:7b"]


@pytest.mark.parametrize(
    "digest", ["sha256:../../../../etc/passwd", "sha256:xyz", "", "sha1:" + "0" * 40]
)
def test_a_manifest_leads_to_nothing_outside_its_blobs(tmp_path: Path, digest: str) -> None:
    """Its digest is a name that somebody else wrote."""
    ollama(tmp_path / ".ollama" / "models", "evil", "latest", digest or "nothing")
    assert models_here([], {}, tmp_path) == []


def test_a_file_that_is_no_model_is_listed_with_the_reason(tmp_path: Path) -> None:
    """So that nobody wonders why it is missing."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    (row,) = rows_of(models_here([tmp_path], {}, tmp_path), load({}, {}), None)
    assert row.problem


def test_what_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    """A cut file, a split model that lacks a part, a file of another user, and a blob that a pull has not finished."""
    whole = bundled_model().read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "theirs.gguf").write_bytes(whole)
    (tmp_path / "theirs.gguf").chmod(0)
    split = tmp_path / "split-00001-of-00002.gguf"
    writer = GGUFWriter(split, "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ollama(tmp_path / ".ollama" / "models", "half", "1b")
    next((tmp_path / ".ollama" / "models" / "blobs").iterdir()).unlink()
    found = {
        row.name: row.problem
        for row in rows_of(models_here([tmp_path], {}, tmp_path), load({}, {}), None)
    }
    assert "is truncated" in found["cut"]
    assert "There is no model file at" in found["split"]
    assert "split-00002-of-00002.gguf" in found["split"]
    assert "There is no model file at" in found["half:1b"]
    if os.geteuid():  # root reads everything
        assert "may not be read by this user" in found["theirs"]


def test_models_in_json_have_their_paths(
    home: Path, there: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    """For scripts."""
    model_at(home / "mine" / "own.gguf")
    assert models_verb(model_dir=(str(home / "mine"),), json=True) == 0
    row, bundled = json.loads(capsys.readouterr().out)
    assert bundled["name"] == "storyteller"
    assert row["path"] == str(home / "mine" / "own.gguf")


# --- list, show, rm ---


def listing(
    capsys: pytest.CaptureFixture[str], verb: Callable[..., int], *words: str, **more: Any
) -> Any:
    """Return the JSON that a verb prints."""
    assert verb(*words, json=True, **more) == 0
    return json.loads(capsys.readouterr().out)


def test_ollamas_list_is_models(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bundled model among them, and what one of them is."""
    model_at(home / "mine" / "own.gguf")
    folder = (str(home / "mine"),)
    rows = listing(capsys, list_models, model_dir=folder)
    assert [row["name"] for row in rows] == ["own", "storyteller"]
    about = listing(capsys, show, "storyteller")
    assert (about["source"], about["chat_template"], about["served"]) == ("bundled", True, "")
    assert show("stroyteller") == 2
    assert "did you mean storyteller?" in capsys.readouterr().err


@pytest.mark.daemon
def test_models_say_what_the_running_daemon_serves(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its own settings; one that was named by its path is listed, too, and is not deleted."""
    elsewhere = model_at(home / "else" / "other.gguf")
    own = model_at(home / "mine" / "own.gguf")
    flags = ["--model", str(own), "--model", str(elsewhere), "--model-dir", str(home / "mine")]
    path = home / "s"
    command = [sys.executable, "-m", "uma_trio", "serve", "--socket", str(path), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as daemon:
        assert daemon.stdout is not None
        while b"stop" not in daemon.stdout.readline():
            assert daemon.poll() is None
        rows = {
            row["name"]: row
            for row in listing(
                capsys, models_verb, socket=str(path), model_dir=(str(home / "mine"),)
            )
        }
        refused = remove("own", yes=True, socket=str(path), model_dir=(str(home / "mine"),))
        daemon.terminate()
        daemon.communicate()
    assert {name: row["served"] for name, row in rows.items()} == {
        "own": "loaded",
        "other": "loaded",
        "storyteller": "",
    }
    assert refused == 2
    assert "uma-trio stop own" in capsys.readouterr().err.replace("-m uma_trio", "uma-trio")
    assert own.exists()


def test_rm_deletes_a_download_with_the_bytes_that_nothing_else_has(
    there: Mirror, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every commit; the other quantisation of the repository stays."""
    assert pull(REPO) == pull(f"{REPO}:Q8_0") == 0
    earlier = home / ".cache/huggingface/hub/models--owner--tiny-GGUF/snapshots/aaa"
    earlier.mkdir()
    (earlier / NAME).symlink_to(f"../../blobs/{there.digest(NAME)}")
    assert remove(f"{REPO}:Q4_K_M", yes=True) == 0
    assert listed(home) == ["tiny-Q8_0.gguf"]
    blobs = [path.name for path in home.rglob("blobs/*")]
    assert blobs == [there.digest("tiny-Q8_0.gguf")]
    assert "Deleted owner/tiny-GGUF:Q4_K_M" in capsys.readouterr().out


def test_rm_asks_first(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without a terminal it wants --yes."""
    own = model_at(home / "mine" / "own.gguf")
    folder = (str(home / "mine"),)
    assert remove("own", model_dir=folder) == 1
    assert "Give --yes." in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    for typed, status in (("\n", 1), ("n\n", 1), ("y\n", 0)):
        assert own.exists()
        monkeypatch.setattr("sys.stdin", Terminal(typed))
        assert remove("own", model_dir=folder) == status
    assert not own.exists()


def test_rm_deletes_nothing_outside_the_model_folders(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path, another program's model, the bundled one, and what a link leads to."""
    own = model_at(home / "mine" / "own.gguf")
    ollama(home / ".ollama" / "models", "tiny", "1b")
    target = model_at(home / "other" / "target.gguf")
    (home / "mine" / "link.gguf").symlink_to(target)
    for name, why in (
        (str(own), "There is no model"),
        ("../own", "There is no model"),
        ("tiny:1b", "`ollama rm`"),
        ("storyteller", "a part of this package"),
    ):
        assert remove(name, yes=True) == 2
        assert why in capsys.readouterr().err
    assert remove("link", yes=True, model_dir=(str(home / "mine"),)) == 0
    assert target.exists()
    assert own.exists()


def test_rm_of_an_ambiguous_name_names_the_models(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not choose one."""
    assert pull(REPO) == pull(f"{REPO}:Q8_0") == 0
    assert remove("tiny-GGUF", yes=True) == 2
    assert "may mean owner/tiny-GGUF:Q4_K_M, owner/tiny-GGUF:Q8_0" in capsys.readouterr().err


def test_rm_removes_all_parts_of_a_split_model(tmp_path: Path) -> None:
    """Of a folder; a part of another model stays."""
    names = [f"m-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    for name in (*names, "n-Q8_0.gguf"):
        model_at(tmp_path / name)
    model = Found("m-Q8_0", str(tmp_path), tmp_path / names[0])
    found = files_to_remove(model, tmp_path / "cache", [tmp_path])
    assert found == [tmp_path / name for name in names]
    with pytest.raises(Trouble, match="in no model folder"):
        files_to_remove(model, tmp_path / "cache", [tmp_path / "else"])


# --- naming ---

HERE = [
    Found("owner/tiny-GGUF:Q8_0", "hf", Path("/hf/8")),
    Found("owner/tiny-GGUF:Q4_K_M", "hf", Path("/hf/4")),
    Found("qwen2.5:7b", "ollama", Path("/o/7")),
    Found("qwen2.5:latest", "ollama", Path("/o/latest")),
    Found("pub/tiny-GGUF:Q2_K", "lmstudio", Path("/l/2")),
]


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("qwen2.5:7b", "/o/7"),
        ("qwen2.5", "/o/latest"),
        ("owner/tiny-GGUF:q8_0", "/hf/8"),
        ("owner/tiny-GGUF", "/hf/4"),
        ("hf:owner/tiny-GGUF:Q8_0", "/hf/8"),
        ("lmstudio:tiny-GGUF", "/l/2"),
        ("hf.co/owner/tiny-GGUF:Q8_0", "/hf/8"),
        ("https://huggingface.co/owner/tiny-GGUF", "/hf/4"),
        ("https://huggingface.co/owner/tiny-GGUF/blob/main/8", "/hf/8"),
        ("/no/such.gguf", "/no/such.gguf"),
    ],
)
def test_a_model_is_found_by_what_people_type(typed: str, path: str) -> None:
    """Whole, without its tag, or without its owner; a path stays one."""
    assert model_file(typed, lambda: HERE) == Path(path)


def test_an_unknown_name_gets_the_nearest_and_a_way_to_fetch_it() -> None:
    """Nobody has to guess the spelling."""
    with pytest.raises(NoSuchModel, match=r"did you mean qwen2\.5:7b\?") as caught:
        model_file("qwen25:7b", lambda: HERE)
    assert "uma-trio models" in str(caught.value)
    with pytest.raises(NoSuchModel, match=r"uma-trio pull owner/other"):
        model_file("owner/other", lambda: HERE)


def test_a_folder_lists_its_files_and_says_how_to_name_them(tmp_path: Path) -> None:
    """One without models says so."""
    for name in ("b-Q8_0.gguf", "a.gguf"):
        model_at(tmp_path / name)
    with pytest.raises(NoSuchModel) as caught:
        model_file(str(tmp_path), lambda: HERE)
    assert "is a directory with a.gguf, b-Q8_0.gguf" in str(caught.value)
    assert f"--model-dir {tmp_path} and name it a" in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoSuchModel, match="is a directory without a model"):
        model_file(str(tmp_path / "empty"), lambda: HERE)


def test_a_path_that_is_nearly_one_names_the_file(tmp_path: Path) -> None:
    """The one beside it that is meant."""
    model_at(tmp_path / "mine.gguf")
    with pytest.raises(
        NoSuchModel, match=r"no model file at .*min\.gguf \(did you mean mine\.gguf\?\)"
    ):
        model_file(str(tmp_path / "min.gguf"), lambda: HERE)
    assert model_file(str(tmp_path / "a-z.gguf"), lambda: HERE)


def test_the_bundled_model_has_a_name(home: Path) -> None:
    """So that it can be served beside another one."""
    assert model_path(load({"model": "storyteller"}, {})) == bundled_model()


def test_serve_takes_a_name_for_its_model(home: Path, there: Mirror) -> None:
    """What is there is served, and what is not is refused before anything is loaded."""
    ollama(home / ".ollama" / "models", "tiny", "1b")
    assert model_path(load({"model": "tiny:1b"}, {})).name.startswith("sha256-")
    with pytest.raises(ModelError, match="There is no model 'tiny:2b' here"):
        model_path(load({"model": "tiny:2b"}, {}))
