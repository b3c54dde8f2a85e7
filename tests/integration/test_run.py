"""`localize run` on real engines: planted faults get the right verdict, attribution and place.

The parent is the installed vLLM in every run, so its captures are made once and serve all runs.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from engines import COMPILED, EAGER, IN_PROCESS, Quiet
from repositories import commit, git

from localizer.capture.request import CaptureRequest
from localizer.capture.session import Progress, capture
from localizer.diff.bisect import judge
from localizer.diff.result import Difference
from localizer.diff.runs import RunResult
from localizer.report import run as report
from localizer.run.config import Config, Passes, Source, Workload
from localizer.run.pipeline import Pipeline
from localizer.sources import fault as faults
from localizer.sources.fault import FACTOR, MLP, MODELS, Fault
from localizer.store import names
from localizer.store.reader import Capture
from localizer.store.schema import Compiled
from localizer.wire.spec import TOKEN

PROMPT, FROM = 6, 12
SCALED = f"hidden_states = hidden_states * {FACTOR}"
IN_LAYER_4 = 'self.self_attn.attn.layer_name == "model.layers.4.self_attn.attn"'
METADATA = (
    '(__import__("vllm.forward_context").forward_context.get_forward_context().attn_metadata or {})'
    ".get(self.self_attn.attn.layer_name)"
)
NOISE = (
    "torch.rand(hidden_states.shape, generator=torch.Generator().manual_seed("
    'int.from_bytes(__import__("os").urandom(6), "big"))).to(hidden_states)'
)
"""Other numbers in every forward: a fault that comes and goes may come again by chance, these do not."""
FAULTS = {
    "value": faults.in_layer(4),
    "batch": Fault(
        MODELS / "llama.py",
        MLP,
        f"{SCALED} if {IN_LAYER_4} and len(getattr({METADATA}, 'query_start_loc', '')) > 4 "
        "else hidden_states",
    ),
    "position": Fault(
        MODELS / "llama.py",
        MLP,
        f"hidden_states = hidden_states.where((positions < {FROM}).unsqueeze(-1), hidden_states * {FACTOR}) "
        f"if {IN_LAYER_4} else hidden_states",
    ),
    "random": Fault(
        MODELS / "llama.py",
        MLP,
        f"hidden_states = hidden_states * (1 + {NOISE}) if {IN_LAYER_4} else hidden_states",
    ),
    "unobserved": Fault(
        MODELS / "llama.py",
        MLP,
        f'{SCALED} if "localizer.hooks.extension" not in __import__("sys").modules else hidden_states',
    ),
    "sampler": Fault(
        Path("vllm/v1/sample/sampler.py"),
        "        sampled, processed_logprobs = self.sample(logits, sampling_metadata)\n",
        "sampled = sampled + (sampled % 5 == 0)",
    ),
    "rotary": Fault(
        MODELS / "llama.py",
        "        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)\n",
        'positions = positions + 1 if self.attn.layer_name == "model.layers.3.self_attn.attn" else positions',
    ),
    "nothing": Fault(MODELS / "llama.py", MLP, "same = hidden_states; hidden_states = same"),
}
"""What is planted, by name."""


pytestmark = pytest.mark.timeout(1200)  # a run is up to twelve engine starts


class Watcher(Quiet):
    """One that nobody listens to."""

    def tell(self, text: str) -> None: ...

    def differences(self, found: list[Difference]) -> None: ...

    def capture(self, name: str) -> Progress:
        return self

    def captured(self, capture: Capture) -> None: ...


@pytest.fixture(scope="module")
def running(root: Path, overlay: Callable[[Fault], Path]) -> Callable[..., RunResult]:
    """Run the installed vLLM against one with a fault."""
    made: dict[str, Path] = {}

    def once(request: CaptureRequest, progress: Progress) -> Path:
        if request.overlay is not None:
            return capture(request, progress)
        key = repr(request)
        if key not in made:
            made[key] = capture(request, progress)
        return made[key]

    def work(fault: str | Fault, passes: Passes, **workload: object) -> RunResult:
        folder = overlay(FAULTS[fault] if isinstance(fault, str) else fault)
        settings = {
            "model": "tiny",
            "matrix": [1, 4],
            "repeats": 1,
            "prompt_tokens": PROMPT,
            "max_tokens": 10,
        }
        config = Config(
            workload=msgspec.convert(settings | {"max_tokens": 10} | workload, Workload),
            candidate=Source(overlay=str(folder)),
            engine=dict(EAGER),
            environment=dict(IN_PROCESS),
            run=passes,
        )
        return carried_out(config, root, root, once)[0]

    return work


def carried_out(
    config: Config, root: Path, base: Path, capturing: Callable[[CaptureRequest, Progress], Path]
) -> tuple[RunResult, str]:
    """A run as the command does it, and its report."""
    pipeline = Pipeline(config, root, base, Watcher(), capturing, fresh=True)
    with pipeline.record as record:
        result = pipeline.run()
        text, tree = io.StringIO(), io.StringIO()
        report.render("text", result, text)
        report.render("json", result, tree)
        record.finish(tree.getvalue(), text.getvalue())
    print(text.getvalue()[:3000])
    return result, text.getvalue()


def place(result: RunResult) -> tuple[str | None, str] | None:
    return None if result.first is None else (result.first.segment.after, result.first.site)


SMALL = """
[workload]
model = "tiny"
matrix = [1]
repeats = 1
max_tokens = 2
prompt_tokens = 6
[candidate]
overlay = "{overlay}"
[engine]
enforce_eager = true
kv_cache_memory_bytes = {cache}
[environment]
VLLM_ENABLE_V1_MULTIPROCESSING = "0"
[run]
untapped = {untapped}
controls = 0
repeats = 0
witness_tries = 0
logprobs = 0
"""
"""A localize.toml that makes as few captures as a question needs."""

AFTER_4 = ("model.layers.4.self_attn.attn/output", "model.layers.5.self_attn.attn/query")
SHORT = Passes(untapped=1, controls=1, repeats=0, witness_tries=1)


def test_a_value_in_one_layer(running: Callable[..., RunResult]) -> None:
    found = running("value", SHORT)
    assert (found.verdict, found.attribution, found.reasons) == ("diverged", "candidate-only", [])
    assert place(found) == AFTER_4
    assert found.first is not None
    assert found.first.max_ulp is not None, "the witness pass kept payload"
    assert {item.differs for item in found.observer} == {"same"}
    assert found.witness is not None
    assert found.witness.reproduced


@pytest.mark.slow
def test_only_in_batches_of_four(running: Callable[..., RunResult]) -> None:
    found = running("batch", SHORT)
    assert (found.verdict, found.attribution, place(found)) == ("diverged", "candidate-only", AFTER_4)
    assert found.first is not None
    assert found.first.request == "r01.00", "the round of four"
    assert all(item.request.startswith("r01.") for item in found.first_pass.requests)


@pytest.mark.slow
def test_only_from_a_position_on(running: Callable[..., RunResult]) -> None:
    found = running("position", SHORT)
    assert (found.verdict, found.attribution, place(found)) == ("diverged", "candidate-only", AFTER_4)
    assert found.first is not None
    assert (found.first.request, found.first.position) == ("r00.00", FROM)


@pytest.mark.slow
def test_only_under_speculation(running: Callable[..., RunResult]) -> None:
    found = running(
        faults.in_draft(), SHORT, speculative_model="tiny-eagle3", speculative={"num_speculative_tokens": 2}
    )
    assert (found.verdict, found.attribution) == ("diverged", "candidate-only")
    assert found.first is not None
    assert found.first.site.startswith("draft:")
    assert "draft-only" in {item.code for item in found.diff.signatures}


@pytest.mark.slow
def test_random(running: Callable[..., RunResult]) -> None:
    found = running("random", Passes(untapped=2, controls=1, repeats=1, witness_tries=2))
    codes = {(reason.code, reason.source) for reason in found.reasons}
    assert found.first_pass.verdict == "diverged"
    assert ("source-not-reproducible", "candidate") in codes
    assert ("source-not-reproducible", "parent") not in codes
    assert found.verdict == "inconclusive"
    assert "witness-not-reproduced" in {code for code, _ in codes}
    assert place(found) == AFTER_4, "what was captured is still told"


@pytest.mark.slow
def test_only_while_nobody_observes(running: Callable[..., RunResult]) -> None:
    found = running("unobserved", Passes(untapped=2, controls=1, repeats=0))
    assert (found.verdict, found.first_pass.verdict) == ("inconclusive", "identical")
    assert [(reason.code, reason.source) for reason in found.reasons] == [
        ("observer-not-neutral", "candidate")
    ]


@pytest.mark.slow
def test_in_the_sampler(running: Callable[..., RunResult]) -> None:
    found = running("sampler", SHORT)
    assert (found.verdict, found.attribution) == ("diverged", "candidate-only")
    assert place(found) == ("lm_head/logits", TOKEN)
    assert found.parity.first is not None
    assert found.parity.first.measured == "logits"


@pytest.mark.slow
def test_in_rotary_embedding(running: Callable[..., RunResult]) -> None:
    found = running("rotary", SHORT)
    assert (found.verdict, found.attribution) == ("diverged", "candidate-only")
    assert place(found) == ("model.layers.2.self_attn.attn/output", "model.layers.3.self_attn.attn/query")


@pytest.mark.slow
def test_a_refactoring_that_changes_nothing(running: Callable[..., RunResult]) -> None:
    found = running("nothing", SHORT)
    assert (found.verdict, found.reasons, found.witness) == ("identical", [], None)


def compiled_of(found: RunResult, root: Path, step: str) -> Compiled:
    """What the capture of a step says of its compiled code."""
    (label,) = (item.capture for item in found.steps if item.step == step)
    manifest = names.load(root, label).manifest
    assert manifest is not None
    assert manifest.compiled is not None
    return manifest.compiled


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_compiled_arms(root: Path, tmp_path: Path, overlay: Callable[[Fault], Path]) -> None:
    """Each arm compiles for itself; with a shared cache nothing is attributed."""
    requests: list[CaptureRequest] = []

    def noted(request: CaptureRequest, progress: Progress) -> Path:
        requests.append(request)
        return capture(request, progress)

    config = Config(
        workload=Workload(model="tiny", matrix=[1, 2], repeats=1, prompt_tokens=PROMPT, max_tokens=4),
        candidate=Source(overlay=str(overlay(FAULTS["value"]))),
        engine=dict(COMPILED),
        environment=dict(IN_PROCESS),
    )
    found, text = carried_out(config, root, tmp_path, noted)
    assert (found.verdict, found.attribution, found.reasons) == ("diverged", "candidate-only", [])
    assert place(found) == AFTER_4
    assert found.compile_cache == "own"
    places = {request.name: request.compile_cache for request in requests}
    arms = {name: places.pop(name) for name in ("parent", "parent-2", "candidate")}
    assert None not in arms.values()
    assert len(set(arms.values())) == 3
    assert all(place == arms[name.partition("-")[0]] for name, place in places.items())
    states = {name: compiled_of(found, root, name).cache for name in arms}
    assert states["parent-2"] == "empty", "the control compiles from nothing"
    assert "empty" not in (states["parent"], states["candidate"]), "their runs without taps came first"
    assert [(item.one.partition("/")[0], item.equal) for item in found.compiled] == [
        ("candidate", False),
        ("parent-2", True),
    ]
    settings = [item.setting for item in found.first_pass.differences]
    assert "compiled.files" in settings
    assert text.index("compiled.files") < text.index("Row pairs"), "code before tensors"
    assert "the same code was generated for parent-2" in text
    assert not any(place.exists() for place in arms.values() if place is not None), "removed with the result"

    few = Passes(untapped=0, controls=1, repeats=0, witness_tries=0, compile_cache="shared")
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    shared = msgspec.structs.replace(config, run=few, environment=IN_PROCESS | cache)
    requests.clear()
    found, text = carried_out(shared, root, tmp_path, noted)
    assert {request.compile_cache for request in requests} == {None}
    assert (found.verdict, found.attribution, place(found)) == ("diverged", "no-control", AFTER_4)
    assert compiled_of(found, root, "parent").cache == "empty"
    assert compiled_of(found, root, "parent-2").cache != "empty", "two parents share it"
    assert "controls attribute nothing" in text
    assert judge(found) == 125, "a control was asked for and cannot speak"


@pytest.mark.slow
def test_kv_blocks_are_made_equal(root: Path, tmp_path: Path) -> None:
    """The sources differ in the size of the KV cache alone; what was asked for is told, and taken."""
    config = Config(
        workload=Workload(model="tiny", matrix=[1], repeats=1, prompt_tokens=PROMPT, max_tokens=2),
        candidate=Source(engine={"kv_cache_memory_bytes": EAGER["kv_cache_memory_bytes"] // 2}),
        engine=dict(EAGER),
        environment=dict(IN_PROCESS),
        run=Passes(untapped=0, controls=0, repeats=0, witness_tries=0, logprobs=0),
    )
    found, text = carried_out(config, root, tmp_path, capture)
    assert (found.verdict, found.reasons) == ("identical", [])
    parent, candidate = found.kv_blocks_before.values()
    assert parent is not None
    assert candidate is not None
    assert parent > candidate
    assert found.pinned == candidate
    assert set(found.kv_blocks.values()) == {candidate}
    assert f"KV cache blocks differed ({parent:,} in parent/" in text
    assert "num_kv_blocks before it was set" in text[: text.index("Token parity")]


@pytest.mark.slow
def test_one_at_a_time_and_on_after_a_kill(tmp_path: Path, overlay: Callable[[Fault], Path]) -> None:
    """The command itself: a second one is refused; after SIGKILL the next goes on, and another begins."""
    settings = tmp_path / "localize.toml"
    settings.write_text(
        SMALL.format(overlay=overlay(FAULTS["value"]), cache=EAGER["kv_cache_memory_bytes"], untapped=1)
    )
    captures = tmp_path / "captures"
    command = [sys.executable, "-m", "localizer", "run", str(settings), "--out", str(captures)]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while not (captures / "runs" / "0001" / "steps.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.2)
        for options in ([], ["--fresh"]):
            second = subprocess.run([*command, *options], capture_output=True, text=True)
            assert second.returncode == 2
            (line,) = second.stderr.strip().splitlines()
            assert "Another localize run is carrying out" in line
    finally:
        first.kill()
        first.wait()
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [step["resumed"] for step in steps] == [True, False, False, False]
    assert len(names.numbered(captures / "runs")) == 1
    listed = subprocess.run(
        [sys.executable, "-m", "localizer", "list", "--out", str(captures)], capture_output=True, text=True
    )
    assert any(
        line.startswith("runs/0001") and line.endswith("diverged") for line in listed.stdout.splitlines()
    )


@pytest.mark.slow
def test_git_bisect_lands_on_the_commit(tmp_path: Path, installed: Path) -> None:
    """Five commits to a repository with one file of vLLM; the third plants a fault."""
    repository = tmp_path / "vllm-checkout"
    original = (installed.parent / MODELS / "llama.py").read_text()
    faulty = original.replace(MLP, MLP + " " * 8 + FAULTS["value"].line + "\n")
    repository.mkdir()
    git(repository, "init", "-q")
    one, two, three = ("# one\n", "# two\n", "# three\n")
    texts = original, original + one, faulty + one, faulty + two, faulty + three
    commits = [commit(repository, {str(MODELS / "llama.py"): text}) for text in texts]
    settings = tmp_path / "localize.toml"
    settings.write_text(SMALL.format(overlay=repository, cache=EAGER["kv_cache_memory_bytes"], untapped=0))
    git(repository, "bisect", "start", commits[-1], commits[0])
    localize = f"{sys.executable} -m localizer.cli.main run {settings} --bisect --out {tmp_path / 'captures'}"
    done = git(repository, "bisect", "run", "sh", "-c", localize)
    assert f"{commits[2]} is the first bad commit" in done
