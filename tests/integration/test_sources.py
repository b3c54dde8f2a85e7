"""A git revision as a source, probes, logprobs and accounting, on real engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash
from engines import EAGER, Capturing, Quiet
from repositories import commit, git, state

from localizer.cache import cache_folder
from localizer.capture.leftovers import members
from localizer.capture.request import CaptureRequest
from localizer.capture.session import capture
from localizer.diff.pipeline import diff
from localizer.errors import CaptureFailed
from localizer.report.captures import details, made
from localizer.report.scope import scope
from localizer.sources.fault import in_layer, plant
from localizer.sources.revision import place
from localizer.store import names
from localizer.store.reader import Capture
from localizer.store.schema import Manifest, Native
from localizer.store.verify import INCOMPLETE, SOUND, verify

pytestmark = pytest.mark.engine

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
PROBES = (
    f"{RUNNER}.execute_model,cache=requests",
    "vllm.v1.spec_decode.ngram_proposer:NgramProposer.propose",
)
WORK = {"matrix": "1,2", "repeats": 2}


def manifest(capture: Capture) -> Manifest:
    assert capture.manifest is not None
    return capture.manifest


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Path:
    """vLLM's llama.py as installed, then with a fault in layer 4; native code that was changed as well."""
    folder = tmp_path_factory.mktemp("vllm")
    git(folder, "init", "-qb", "main")
    model = Path("vllm/model_executor/models/llama.py")
    text = (installed.parent / model).read_text()
    commit(folder, {str(model): text, "csrc/attention.cu": "1", "vllm/model_executor/models/new.py": ""})
    plant(folder, installed, in_layer(4))
    commit(folder, {"csrc/attention.cu": "2"})
    git(folder, "branch", "feature/fault")
    git(folder, "reset", "-q", "--hard", "main~1")
    git(folder, "tag", "v0.32.0", "main")
    (folder / model).write_text("raise RuntimeError('what is not committed must not run')\n")
    return folder


@pytest.fixture(scope="module")
def candidate(capturing: Capturing, repository: Path) -> tuple[Capture, bool]:
    """The faulty revision, run in several processes; and whether the repository was left as it was."""
    before = state(repository)
    settings = {"environment": {}, "git": f"{repository}@feature/fault", "logprobs": 2, "probes": PROBES}
    taken = capturing("sources-git", **WORK, **settings)
    return taken, state(repository) == before


def test_a_revision_runs_and_the_repository_is_left_alone(
    candidate: tuple[Capture, bool], repository: Path
) -> None:
    taken, untouched = candidate
    assert untouched
    assert verify(taken.folder).state == SOUND
    overlay = taken.open.source.overlay
    assert overlay is not None
    assert overlay.git is not None
    assert (overlay.git.repository, overlay.git.revision) == (str(repository), "feature/fault")
    assert overlay.git.commit == git(repository, "rev-parse", "feature/fault")
    assert overlay.path == str(place(repository))
    assert list(overlay.files) == ["model_executor/models/llama.py", "model_executor/models/new.py"]
    identity = manifest(taken).identity
    assert identity is not None
    assert identity.python.changed == ["vllm/model_executor/models/llama.py"]
    assert f"commit {overlay.git.commit}" in details(taken)


def test_the_fault_of_a_revision_is_found(
    candidate: tuple[Capture, bool], capturing: Capturing, repository: Path
) -> None:
    taken, _ = candidate
    result = diff(taken, capturing("facts-eager", **WORK))
    assert result.first is not None
    assert (result.verdict, result.first.site) == ("diverged", "model.layers.5.self_attn.attn/query")
    commit = git(repository, "rev-parse", "feature/fault")
    assert ("git.commit", commit, None) in [
        (item.setting, item.candidate, item.parent) for item in result.differences
    ]
    native = Native(against="installed", base="v0.32.0", files=["csrc/attention.cu"], count=1)
    assert result.captures.candidate.native == native
    assert [line for line in scope(result).does_not_establish if "csrc/attention.cu differs" in line]
    assert "native code is not rebuilt: csrc/attention.cu differs from v0.32.0" in made(taken)


def test_probes_count_the_steps(candidate: tuple[Capture, bool]) -> None:
    taken, _ = candidate
    counts = manifest(taken).counts
    step, never = manifest(taken).probes
    steps = counts["steps"]
    assert step.target == f"{RUNNER}.execute_model"
    assert step.calls == steps
    assert step.hits == steps - 4  # a round's first step has new requests
    assert (never.calls, never.hits, never.calls_outside_steps) == (0, None, 0)
    assert "NgramProposer.propose was never called in a recorded step: it did not run there" in made(taken)
    assert (counts["target_metadata_builds"], counts["target_forwards_none"]) == (steps, steps)
    assert not [name for name in counts if name.startswith("draft_metadata")]


def test_logprobs_are_those_of_the_returned_tokens(candidate: tuple[Capture, bool]) -> None:
    taken, _ = candidate
    assert taken.open.workload.sampling["logprobs"] == 2
    for output in manifest(taken).outputs:
        assert len(output.logprobs) == len(output.tokens)
        for token, found in zip(output.tokens, output.logprobs, strict=True):
            values = [value for _, value in found]
            assert (dict(found)[token], len(found)) == (
                values[0],
                2,
            )  # greedy; the first may be as likely
            assert all(isinstance(value, float) and value < 0 for value in values)
            assert values == sorted(values, reverse=True)


def test_every_process_is_accounted_for(candidate: tuple[Capture, bool]) -> None:
    taken, _ = candidate
    found = manifest(taken)
    processes = {"program", "writer", "worker-0"}
    assert processes < set(found.peak_memory_bytes)
    (core,) = set(found.peak_memory_bytes) - processes
    assert core.startswith("EngineCore")
    for name, size in found.peak_memory_bytes.items():
        assert size > 10 << 20
        assert 0 < found.durations[name] < found.durations["total"]
    assert (found.counts["left_processes"], found.counts["left_shared_memory"]) == (0, 0)
    assert found.left_shared_memory == {}


def test_logprobs_without_taps(capturing: Capturing, candidate: tuple[Capture, bool]) -> None:
    taken = capturing("sources-untapped", **WORK, logprobs=2, taps=False)
    assert verify(taken.folder).state == SOUND
    assert all(len(output.logprobs) == len(output.tokens) for output in manifest(taken).outputs)
    tapped = capturing("facts-eager", **WORK)
    assert [output.tokens for output in manifest(taken).outputs] == [
        output.tokens for output in manifest(tapped).outputs
    ]


def test_a_probe_of_nothing_stops_the_run(root: Path, vllm_cache: dict[str, str]) -> None:
    before = set(members(os.getpgid(0)))
    request = CaptureRequest(
        name="sources-nothing",
        root=root,
        model="tiny",
        engine=EAGER,
        environment=vllm_cache,
        probes=[f"{RUNNER}.no_such_method"],
    )
    with pytest.raises(CaptureFailed, match=r"cannot be placed: GPUModelRunner has no no_such_method"):
        capture(request, Quiet())
    left = names.load(root, "sources-nothing")
    assert verify(left.folder).state == INCOMPLETE
    assert left.outputs == {}
    assert set(members(os.getpgid(0))) <= before


def test_one_repository_keeps_one_tree(repository: Path) -> None:
    """vLLM's compile cache is keyed by paths."""
    assert place(repository).is_relative_to(cache_folder() / "git")
    assert place(repository).name == xxhash.xxh3_64_hexdigest(os.fsencode(repository / ".git"))
