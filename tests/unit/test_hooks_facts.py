"""What a worker tells of compiled code, loaded files, hardware and its resolved configuration."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from localizer.hooks import compiled, loaded, resolved  # noqa: E402 - needs torch
from localizer.store.schema import Gpu, check_settings  # noqa: E402


class Mode(Enum):
    NONE = 0
    TRACED = 2


# -- compiled code ----------------------------------------------------------------------------------------


def config(mode: Any, folder: str = "") -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode, backend="inductor", local_cache_dir=folder)
    )


@pytest.mark.parametrize("mode", [None, 0])
def test_not_compiled(mode: Any) -> None:
    assert compiled.compile_facts(config(mode), False) is None


@pytest.mark.parametrize(
    ("counts", "was_empty", "cache"),
    [
        ({"num_aot_artifacts_loaded": 1}, False, "hit"),
        ({"num_aot_artifacts_loaded": 1, "num_aot_compiles": 1}, False, "miss"),
        ({"num_compiled_artifacts_saved": 2}, False, "miss"),
        ({}, False, "miss"),
        ({"num_aot_compiles": 1}, True, "empty"),
    ],
)
def test_state_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], was_empty: bool, cache: str
) -> None:
    from vllm.compilation import counter

    zero = {"num_models_seen": 1, "num_graphs_seen": 0}
    monkeypatch.setattr(counter, "compilation_counter", SimpleNamespace(**(zero | counts)))
    found = compiled.compile_facts(config(Mode.TRACED), was_empty)
    assert found is not None
    assert (found["mode"], found["backend"], found["cache"]) == ("TRACED", "inductor", cache)
    assert found["counters"] == {"num_models_seen": 1} | counts


def test_whether_the_cache_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert compiled.cache_is_empty()
    (tmp_path / "torch_compile_cache").mkdir()
    assert compiled.cache_is_empty()
    (tmp_path / "torch_compile_cache" / "abc").mkdir()
    assert not compiled.cache_is_empty()


def test_generated_files_are_those_that_were_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a library its generated source; not what other runs left in the folder."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "ab").mkdir()
    names = ("ab/x.so", "ab/x.cpp", "ab/old.so", "ab/old.cpp", "ab/m.py", "computation_graph.py")
    for name in names:
        (tmp_path / name).touch()
    module: Any = ModuleType("generated")
    module.__file__ = str(tmp_path / "ab" / "m.py")
    monkeypatch.setitem(sys.modules, "generated", module)
    monkeypatch.setattr(compiled, "mapped_files", lambda: [str(tmp_path / "ab" / "x.so"), "/usr/lib/y.so"])
    found = compiled.generated_files(str(tmp_path))
    assert found == {name: str(tmp_path / name) for name in ("ab/m.py", "ab/x.cpp", "computation_graph.py")}


# -- loaded files and hardware ----------------------------------------------------------------------------


def test_native_libraries_are_the_mapped_ones() -> None:
    found = loaded.native_libraries()
    assert "torch/lib/libtorch_cpu.so" in found
    assert all(Path(path).is_file() and path.endswith(name) for name, path in found.items())
    assert not [name for name in found if name.startswith("numpy")]


def test_python_files_are_the_imported_ones() -> None:
    import vllm

    found = loaded.python_files()
    assert found["vllm/__init__.py"] == vllm.__file__
    assert set(found) < {
        str(path.relative_to(Path(vllm.__file__).parents[1]))
        for path in Path(vllm.__file__).parent.rglob("*.py")
    }


def test_the_processor_and_no_gpu() -> None:
    found = loaded.hardware_facts()
    assert found["processor"]["threads"] == torch.get_num_threads()
    assert found["processor"]["capability"]
    assert found["gpus"] == [] or torch.cuda.is_initialized()


def test_the_gpu_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is doubled: what torch tells of a device is put into words."""
    told = SimpleNamespace(name="NVIDIA H200", uuid="0000-1", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(loaded, "driver", lambda: "580.1")
    (found,) = loaded.gpus()
    assert found == {
        "name": "NVIDIA H200", "uuid": "0000-1", "driver": "580.1", "cuda": "13.0", "capability": "9.0",
    }  # fmt: skip
    msgspec.convert(found, Gpu)


def test_the_driver(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert loaded.driver(str(path)) == ""
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build\n",
    ):
        path.write_text(line)
        assert loaded.driver(str(path)) == "535.104.05"


# -- the resolved configuration ---------------------------------------------------------------------------


@dataclass
class Inner:
    dtype: Any = torch.bfloat16
    place: Any = field(default_factory=lambda: Path("/models"))
    names: Any = field(default_factory=lambda: {"b", "a"})
    scale: float = float("inf")
    large: int = 1 << 70
    thing: Any = field(default_factory=object)
    master_port: int = 1234


@dataclass
class Config:
    mode: Mode = Mode.TRACED
    inner: Inner = field(default_factory=Inner)
    foreign: Any = None
    table: Any = field(default_factory=lambda: {1: torch.float32, "thing": object()})
    mixed: Any = field(default_factory=lambda: [1, object()])
    long: Any = field(default_factory=lambda: list(range(1000)))
    instance_id: str = "abc"
    _private: int = 1


Inner.__module__ = Config.__module__ = "vllm.config"


@dataclass
class Foreign:
    value: int = 1


def test_plain_values_by_section() -> None:
    found = resolved.resolved(Config(foreign=Foreign()))
    assert found == {
        "mode": "TRACED",
        "inner": {
            **{"dtype": "bfloat16", "place": "/models", "names": ["a", "b"], "scale": "inf"},
            "large": str(1 << 70),
        },
        "table": {"1": "float32"},
    }
    check_settings(json.loads(json.dumps(found)))


def test_a_configuration_is_bounded() -> None:
    loop: list[Any] = []
    loop.append(loop)
    config = Config(table={str(n): {str(m): n for m in range(200)} for n in range(200)}, mixed=loop)
    check_settings(resolved.resolved(config))
