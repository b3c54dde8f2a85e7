"""Settings that differ are listed once; what one capture does not know is no difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builders import Plan, pair

from localizer.diff import diff
from localizer.diff.settings import differences
from localizer.store.reader import Capture
from localizer.store.schema import Compiled, Identity, Imported, Weights


def listed(root: Path, ours: dict[str, Any], theirs: dict[str, Any], **candidate: Any) -> dict[str, Any]:
    candidate_folder, parent_folder = pair(root, Plan(manifested=theirs), manifested=ours, **candidate)
    found = differences(Capture(candidate_folder), Capture(parent_folder))
    return {item.setting: (item.candidate, item.parent) for item in found}


def weights(**tensors: str) -> Weights:
    return Weights(algorithm="blake2b-128", digest="-".join(tensors.values()), tensors=tensors)


def identity(**native: str) -> Identity:
    return Identity(native=native, python=Imported(files=1, digest="d", changed=[]))


def test_weights(tmp_path: Path) -> None:
    ours, theirs = weights(a="1", b="2", c="3"), weights(a="1", b="4", d="5")
    assert listed(tmp_path, {"weights": ours}, {"weights": theirs}) == {
        "loaded weights": ("1-2-3, 3 of 4 tensors differ", "1-4-5"),
        "loaded weights.b": ("2", "4"),
        "loaded weights.c": ("3", None),
        "loaded weights.d": (None, "5"),
    }


def test_only_the_first_weights_are_named(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(20)]
    ours, theirs = weights(**dict.fromkeys(names, "1")), weights(**dict.fromkeys(names, "2"))
    found = listed(tmp_path, {"weights": ours}, {"weights": theirs})
    assert len(found) == 6
    assert "20 of 20 tensors differ" in found["loaded weights"][0]


def test_weights_do_not_decide(tmp_path: Path) -> None:
    folders = pair(
        tmp_path, Plan(manifested={"weights": weights(a="1")}), manifested={"weights": weights(a="2")}
    )
    result = diff(*map(Capture, folders))
    assert result.verdict == "identical"
    assert "loaded weights" in [item.setting for item in result.differences]


def test_what_one_side_does_not_know(tmp_path: Path) -> None:
    everything = {
        "weights": weights(a="1"),
        "identity": identity(lib="1"),
        "compiled": Compiled(mode="M", backend="b", cache="hit", counters={}, files={}),
        "config": {"cache_config": {"block_size": 16}},
    }
    assert listed(tmp_path, everything, {}) == {}


def test_compiled_code_and_libraries(tmp_path: Path) -> None:
    code = Compiled(mode="M", backend="b", cache="hit", counters={"n": 1}, files={"x.cpp": "1"})
    found = listed(
        tmp_path, {"identity": identity(lib="1"), "compiled": code}, {"identity": identity(lib="2")}
    )
    summary = found.pop("compiled.files")
    assert summary[0].startswith("1 files, ")
    assert found == {
        "identity.native.lib": ("1", "2"),
        "compiled.mode": ("M", None),
        "compiled.backend": ("b", None),
        "compiled.cache": ("hit", None),
    }


def test_fields_that_another_version_does_not_have(tmp_path: Path) -> None:
    ours = {"config": {"cache_config": {"size": 1, "new": True}}}
    theirs = {"config": {"cache_config": {"size": 2}, "old_config": None}}
    both = {"config.cache_config.size"}
    assert set(listed(tmp_path, ours, theirs, vllm="9.9")) == both | {"source.vllm"}
    one_sided = {"config.cache_config.new", "config.old_config"}
    assert set(listed(tmp_path / "same", ours, theirs)) == both | one_sided


def test_the_resolved_configuration_repeats_nothing(tmp_path: Path) -> None:
    ours = {"config": {"model_config": {"enforce_eager": True, "seed": 0}, "cache_config": {"size": 1}}}
    theirs = {"config": {"model_config": {"enforce_eager": False, "seed": 0}, "cache_config": {"size": 2}}}
    found = listed(tmp_path, ours, theirs, running={"enforce_eager": True}, engine={"enforce_eager": True})
    assert list(found) == [
        "engine.enforce_eager", "running.enforce_eager", "config.model_config.enforce_eager",
        "config.cache_config.size",
    ]  # fmt: skip
