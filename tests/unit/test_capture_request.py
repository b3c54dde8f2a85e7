"""A request is checked and described before anything starts, and secrets stay where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repositories import commit, git

from localizer.capture import request as module
from localizer.capture.request import CaptureRequest, observer_changes, prepare, recorded_environment
from localizer.errors import LocalizerError
from localizer.sources.interpreter import Interpreter
from localizer.store.schema import GraphTaps, Native, Revision


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with a vLLM, and a model."""
    monkeypatch.setenv("LOCALIZER_CACHE", str(tmp_path / "cache"))
    vllm = tmp_path / "site" / "vllm"
    vllm.mkdir(parents=True)
    (vllm / "core.py").write_text("core\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 50}')
    found = Interpreter("/usr/bin/python3", "3.11.0", "1.0", vllm, "2.0", {"numpy": "2.1"})
    monkeypatch.setattr(module.interpreter, "probe", lambda python, environment: found)
    return vllm


def request(tmp_path: Path, **changes: object) -> CaptureRequest:
    settings = {"name": "c", "root": tmp_path / "captures", "model": str(tmp_path / "model")} | changes
    return CaptureRequest(**settings)  # type: ignore[arg-type]


def test_what_is_described(tmp_path: Path) -> None:
    prepared = prepare(
        request(
            tmp_path, matrix="1,3", prompt_tokens=5, seed=7, engine={"enforce_eager": True}, payload="all"
        )
    )
    work = prepared.opening.workload
    assert (work.matrix, work.repeats, len(work.prompts)) == ([1, 3], 2, 3)
    assert {len(prompt) for prompt in work.prompts} == {5}
    assert max(max(prompt) for prompt in work.prompts) < 50
    assert (work.engine, work.sampling["max_tokens"]) == ({"enforce_eager": True}, 64)
    assert list(work.model.files) == ["config.json"]
    source = prepared.opening.source
    assert (source.vllm, source.torch, source.packages, source.overlay) == (
        "1.0",
        "2.0",
        {"numpy": "2.1"},
        None,
    )
    assert (prepared.executable, prepared.laid) == ("/usr/bin/python3", None)
    assert not (tmp_path / "captures").exists()


def test_an_overlay_is_laid_and_described(tmp_path: Path) -> None:
    (tmp_path / "checkout" / "vllm").mkdir(parents=True)
    (tmp_path / "checkout" / "vllm" / "core.py").write_text("changed\n")
    prepared = prepare(request(tmp_path, overlay=tmp_path / "checkout"))
    overlay = prepared.opening.source.overlay
    assert overlay is not None
    assert (overlay.path, list(overlay.files)) == (str(tmp_path / "checkout"), ["core.py"])
    assert prepared.laid is not None
    assert (prepared.laid.tree / "vllm" / "core.py").read_text() == "changed\n"


def test_without_taps_nothing_is_kept(tmp_path: Path) -> None:
    prepared = prepare(request(tmp_path, taps=False, engine={"worker_extension_cls": "mine"}))
    assert (prepared.opening.observer.taps, prepared.opening.observer.payload) == (False, "none")
    assert len(observer_changes(request(tmp_path, taps=False))) < len(observer_changes(request(tmp_path)))


def test_the_environment_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    monkeypatch.setenv("ELSEWHERE", "1")
    prepared = prepare(request(tmp_path, environment={"MINE": "2"}))
    given = {"VLLM_NO_USAGE_STATS": "0", "ELSEWHERE": "1", "MINE": "2", "PYTHONUNBUFFERED": "1"}
    assert given.items() <= prepared.environment.items()
    assert "environment: VLLM_NO_USAGE_STATS=1" not in prepared.opening.observer.changes


def test_what_is_recorded_of_it() -> None:
    environment = {
        "VLLM_USE_X": "1", "VLLM_MAX_TOKENS_PER_Y": "8", "CUDA_VISIBLE_DEVICES": "0", "LD_PRELOAD": "a.so",
        "HOME": "/home/me", "HF_TOKEN": "hf_1", "MINE": "2", "SECRET": "no",
    }  # fmt: skip
    assert recorded_environment(environment, {"MINE": "2"}) == {
        "VLLM_USE_X": "1", "VLLM_MAX_TOKENS_PER_Y": "8", "CUDA_VISIBLE_DEVICES": "0", "LD_PRELOAD": "a.so",
        "MINE": "2",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_API_KEY",
        "HF_TOKEN",
        "hf_token",
        "AWS_SECRET_ACCESS_KEY",
        "MY_SECRET",
        "DB_PASSWORD",
        "X_CREDENTIALS",
    ],
)
def test_secrets_are_never_recorded(name: str) -> None:
    """Captures are attached to public comments."""
    assert recorded_environment({name: "hidden"}, {name: "hidden"}) == {name: "(not recorded)"}


def test_more_tokens_than_a_manifest_holds_are_refused_before_they_are_generated(tmp_path: Path) -> None:
    prepare(request(tmp_path, matrix="1000", max_tokens=1000, prompt_tokens=2, repeats=3))
    with pytest.raises(LocalizerError, match="4,000 requests of 2,000 tokens are more than a manifest holds"):
        prepare(request(tmp_path, matrix="1000", max_tokens=2000, prompt_tokens=2, repeats=4))


UNSUPPORTED: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({"enable_lora": True}, {}, "LoRA adapters are not supported yet, .* leave enable_lora out of --engine"),
    ({"enable_prompt_embeds": True}, {}, "Prompt embeddings .* leave enable_prompt_embeds out"),
    ({}, {"vision_config": {"depth": 2}, "text_config": {}}, "images, audio or video .* language_model_only"),
    ({}, {"audio_config": {}}, "Models that take images, audio or video are not supported yet"),
    ({}, {"is_encoder_decoder": True}, "an encoder and a decoder .* name one that has a decoder only"),
    ({"runner": "pooling"}, {"architectures": ["LlamaForCausalLM"]}, "Pooling models return no tokens"),
    (
        {"pipeline_parallel_size": 2},
        {},
        "Pipeline parallelism is not supported .* leave pipeline_parallel_size",
    ),
    ({"data_parallel_size": 2}, {}, "Data parallelism is not supported yet"),
    ({"decode_context_parallel_size": 2}, {}, "Decode context parallelism is not supported yet"),
    ({"prefill_context_parallel_size": 2}, {}, "Prefill context parallelism is not supported yet"),
    (
        {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
        {},
        "Several workers are captured only if vLLM starts them itself",
    ),
    ({"tensor_parallel_size": 2, "nnodes": 2}, {}, "Several workers .* leave .* and nnodes out of --engine"),
    ({"convert": "embed"}, {}, "Pooling models return no tokens, .* name a model that does"),
    ({}, {"architectures": ["Qwen2ForSequenceClassification"]}, "Pooling models .* name a model that does"),
]
"""Engine arguments, what config.json holds, and what is said."""


def write_config(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 50} | config))


@pytest.mark.parametrize(("engine", "config", "said"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_before_anything_starts(
    tmp_path: Path, engine: dict[str, object], config: dict[str, object], said: str
) -> None:
    write_config(tmp_path, config)
    with pytest.raises(LocalizerError, match=rf"{said}.*\.$") as refused:
        prepare(request(tmp_path, engine=engine))
    assert "\n" not in str(refused.value)
    if "Pooling" in said:  # there would be no tokens either
        with pytest.raises(LocalizerError, match="return no tokens"):
            prepare(request(tmp_path, engine=engine, taps=False))
    else:
        assert ("--no-taps" in str(refused.value)) == (
            "images" not in said
        )  # vLLM needs a tokenizer for them
        prepare(request(tmp_path, engine=engine, taps=False))


@pytest.mark.parametrize(
    ("engine", "config"),
    [
        ({"language_model_only": True}, {"vision_config": {}}),
        ({"enable_lora": False, "enable_prompt_embeds": False}, {"is_encoder_decoder": False}),
        ({"runner": "auto", "convert": "none"}, {}),
        ({"runner": "generate"}, {"architectures": ["MyRewardModel"]}),
        ({}, {"architectures": ["ChatGLMModel"], "vision_config": None}),
        ({}, {"architectures": "RewardModel"}),
        ({}, {"architectures": [7]}),
        ({}, {"architectures": []}),
    ],
)
def test_what_may_be_supported_is_left_to_vllm(
    tmp_path: Path, engine: dict[str, object], config: dict[str, object]
) -> None:
    write_config(tmp_path, config)
    assert prepare(request(tmp_path, engine=engine)).engine == engine


def test_several_workers_are_described(tmp_path: Path) -> None:
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    opening = prepare(request(tmp_path, engine=parallel, digest_split=4)).opening
    assert (opening.observer.ranks, opening.observer.digest_split) == (2, 4)
    assert "for each worker" in opening.observer.changes[-1]
    alone = prepare(request(tmp_path)).opening
    assert (alone.observer.ranks, alone.observer.digest_split) == (1, 1)
    assert "for each worker" not in alone.observer.changes[-1]
    untapped = prepare(request(tmp_path, engine=parallel, digest_split=4, taps=False)).opening
    assert (untapped.observer.ranks, untapped.observer.digest_split) == (1, 1)


@pytest.mark.parametrize("size", [0, -1, "two", 1.5, True, 1025, None])
def test_what_is_no_number_of_workers(tmp_path: Path, size: object) -> None:
    with pytest.raises(LocalizerError, match=r"^Workers are from 1 to 1024; set tensor_parallel_size"):
        prepare(request(tmp_path, engine={"tensor_parallel_size": size}))


def test_modules_of_several_workers_are_refused(tmp_path: Path) -> None:
    engine = {"tensor_parallel_size": 2, "enforce_eager": True}
    with pytest.raises(LocalizerError, match=r"leave out --level module or tensor_parallel_size"):
        prepare(request(tmp_path, engine=engine, level="module"))


def test_ranges_of_heads_are_hashed_on_the_host(tmp_path: Path) -> None:
    with pytest.raises(LocalizerError, match=r"leave out --digest-split or --row-digest device\.$"):
        prepare(request(tmp_path, digest_split=2, row_digest="device"))


def test_a_configuration_that_cannot_be_read_is_left_to_vllm(tmp_path: Path) -> None:
    for text in ("[1]", "{", "[" * 200_000):
        (tmp_path / "model" / "config.json").write_text(text)
        prepare(request(tmp_path))


def test_logprobs_are_asked_for_and_count(tmp_path: Path) -> None:
    assert "logprobs" not in prepare(request(tmp_path)).opening.workload.sampling
    assert prepare(request(tmp_path, logprobs=0)).opening.workload.sampling["logprobs"] == 0
    many = {"matrix": "1000", "repeats": 1, "prompt_tokens": 2, "max_tokens": 100}
    prepare(request(tmp_path, **many, logprobs=3, taps=False))
    with pytest.raises(LocalizerError, match="with logprobs are more than a manifest holds"):
        prepare(request(tmp_path, **many, logprobs=-1))


def test_probes_are_read_before_anything_starts(tmp_path: Path) -> None:
    probes = ("a.b:C.m,cache=x", "a:f")
    observer = prepare(request(tmp_path, probes=probes)).opening.observer
    assert observer.probes == probes
    assert "worker: a.b:C.m is wrapped and its calls are counted" in observer.changes
    for odd, said in (
        (("a.b",), r"--probe 'a.b' is not module:Class.method"),
        (("a:f", "a:f,cache=x"), "--probe names a:f twice"),
    ):
        with pytest.raises(LocalizerError, match=said):
            prepare(request(tmp_path, probes=odd))
    with pytest.raises(LocalizerError, match="leave out --no-taps, or --probe"):
        prepare(request(tmp_path, probes=probes, taps=False))


def test_a_git_revision_is_laid_and_described(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    repository.mkdir()
    git(repository, "init", "-qb", "main")
    head = commit(repository, {"vllm/core.py": "changed\n", "csrc/a.cu": ""})
    said: list[str] = []
    prepared = prepare(request(tmp_path, git=f"{repository}@main"), said.append)
    overlay = prepared.opening.source.overlay
    assert overlay is not None
    assert overlay.git == Revision(repository=str(repository), revision="main", commit=head)
    assert overlay.native == Native(against="unknown", base="v1.0", files=[], count=0)
    assert list(overlay.files) == ["core.py"]
    assert prepared.laid is not None
    assert (prepared.laid.tree / "vllm" / "core.py").read_text() == "changed\n"
    assert said == [f"reading vllm/ of {repository}@main"]
    with pytest.raises(LocalizerError, match="use --overlay or --git, not both"):
        prepare(request(tmp_path, git=f"{repository}@main", overlay=repository))


def test_the_native_code_of_an_overlay_is_described(tmp_path: Path) -> None:
    for name in ("vllm/core.py", "csrc/a.cu"):
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True)
        path.write_text("changed\n")
    overlay = prepare(request(tmp_path, overlay=tmp_path / "checkout")).opening.source.overlay
    assert overlay is not None
    assert overlay.native == Native(against="folder", files=["csrc/a.cu"], count=1)


def test_rows_are_hashed_on_a_device_only_where_there_is_one(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = prepare(request(tmp_path, row_digest="device")).opening
    assert opening.observer.row_digest == "device"
    assert any("hashed there, by a Triton kernel" in change for change in opening.observer.changes)
    assert prepare(request(tmp_path)).opening.observer.row_digest == "host"
    cpu = Interpreter("/usr/bin/python3", "3.11.0", "1.0", installed, "2.0+cpu", {})
    monkeypatch.setattr(module.interpreter, "probe", lambda python, environment: cpu)
    with pytest.raises(LocalizerError, match="Rows are hashed on the device only where that is a CUDA GPU; "):
        prepare(request(tmp_path, row_digest="device"))
    assert prepare(request(tmp_path, row_digest="device", taps=False)).opening.observer.row_digest == "host"


def test_memory_of_taps_inside_graphs_is_stated_and_bounded(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 4096}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    said: list[str] = []
    observer = prepare(request(tmp_path, graph_rows=100), said.append).opening.observer
    assert observer.graph_taps == GraphTaps(rows=100, bytes=100 * 2 * 4 * 4096 * 2)
    assert said[-1] == "taps inside full CUDA graphs of up to 100 rows will need about 7 MiB on the device"
    assert prepare(request(tmp_path, graph_rows=100, graph_memory=7)).opening.observer.graph_memory == 7 << 20
    with pytest.raises(
        LocalizerError, match=r"up to 512 rows need about 32 MiB .* than --graph-memory 8; tap"
    ):
        prepare(request(tmp_path, graph_memory=8))
    for changes in ({"taps": False}, {"engine": {"enforce_eager": True}}):
        assert prepare(request(tmp_path, graph_memory=8, **changes)).opening.observer.graph_taps is None
    cpu = Interpreter("/usr/bin/python3", "3.11.0", "1.0", installed, "2.0+cpu", {})
    monkeypatch.setattr(module.interpreter, "probe", lambda python, environment: cpu)
    assert prepare(request(tmp_path, graph_memory=8)).opening.observer.graph_taps is None
