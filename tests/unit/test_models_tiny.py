"""Models by name, and the built-in one: the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from localizer.cache import cache_folder
from localizer.errors import LocalizerError
from localizer.store.tensors import TensorFile, file_digest
from localizer.workload.build import build
from localizer.workload.draw import SEED
from localizer.workload.models import digests, resolve
from localizer.workload.tiny import CONFIG, HIDDEN, LAYERS, VOCABULARY, write_tiny


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "deep" / "tiny"
    build(folder, write_tiny)
    return folder


def test_the_tiny_model_is_always_the_same(built: Path) -> None:
    assert digests(built) == {
        "config.json": "da0739e7370f6858ac4b55180bef983f",
        "model.safetensors": "8d46d82e1642443df1c7a78d62f562af",
    }
    assert [path.name for path in built.parent.iterdir()] == ["tiny"]  # no scratch is left


def test_the_tiny_model_is_a_llama(built: Path) -> None:
    assert json.loads((built / "config.json").read_text()) == CONFIG
    file = TensorFile(built / "model.safetensors")
    assert len(file.names()) == 3 + 9 * LAYERS
    assert {file.dtype(name) for name in file.names()} == {"bfloat16"}
    assert file.shape("lm_head.weight") == (VOCABULARY, HIDDEN)
    assert file.array("model.layers.7.mlp.down_proj.weight").dtype == np.dtype(ml_dtypes.bfloat16)


def test_a_model_that_is_there_is_not_built_again(built: Path) -> None:
    before = (built / "model.safetensors").stat()
    build(built, write_tiny)
    after = (built / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_half_a_model_is_built_again(tmp_path: Path, built: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    build(folder, write_tiny)
    assert digests(folder) == digests(built)


def test_resolving_the_built_in_models(cache: Path, built: Path) -> None:
    model, draft = resolve("tiny"), resolve("tiny-eagle3")
    assert (model.name, model.path) == ("tiny", str(cache / "models" / f"tiny-{SEED}"))
    assert model.files == digests(built)
    assert draft.files == {
        "config.json": "51541948064ac68a050d6abf23ce562a",
        "model.safetensors": "2b09362d304845955c0e74583f645b09",
    }
    assert TensorFile(Path(draft.path) / "model.safetensors").shape("fc.weight") == (HIDDEN, 3 * HIDDEN)


def test_resolving_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "notes.txt").write_text("not hashed")
    (tmp_path / "model" / "sub.json").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model", "./model", str(tmp_path / "model"), "~/model"):
        model = resolve(name)
        assert (model.name, model.path) == (name, str(tmp_path / "model"))
        assert model.files == {"config.json": file_digest(tmp_path / "model" / "config.json")}


def test_resolving_a_hub_name() -> None:
    model = resolve("org/some-model.v1")
    assert (model.name, model.path, model.files) == ("org/some-model.v1", "org/some-model.v1", {})


@pytest.mark.parametrize(
    "name", ["", "nothing", "./nothing", "/no/model", "a/b/c", "~nobody-here/m", "a\0b", "../x"]
)
def test_a_model_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LocalizerError, match=r"There is no model|holds no config\.json"):
        resolve(name)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(LocalizerError, match=r"holds no config\.json"):
        resolve(str(tmp_path))


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LOCALIZER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "localizer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "localizer"
    monkeypatch.setenv("LOCALIZER_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("LOCALIZER_CACHE", "~nobody-here/mine")
    assert cache_folder().name == "mine"


def test_only_configuration_and_weights_make_a_model(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.model", "README.md"):
        (tmp_path / name).write_text("{}")
    assert list(digests(tmp_path)) == ["config.json", "model.safetensors"]
