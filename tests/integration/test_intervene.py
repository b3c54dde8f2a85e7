"""One change in a real vLLM, in one process: as it is, changed, restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import COMPILED, EAGER, IN_PROCESS, Capturing

from localizer.capture.interventions import intervention
from localizer.diff import intervention as codes
from localizer.diff.intervention import Intervened, judge
from localizer.errors import CaptureFailed
from localizer.sources.fault import FACTOR
from localizer.store.names import load
from localizer.store.verify import SOUND, verify

pytestmark = pytest.mark.engine

LAYER, MLP = 4, "vllm.model_executor.models.llama:LlamaMLP.forward"
ROUNDS = {"matrix": "1,2", "repeats": 1, "max_tokens": 6}
STEPS, LAYERS = 12, 8
"""Steps of one phase, and layers of the tiny model."""

CHANGE = f"""
def scaled(original, self, x):
    \"\"\"The fault of localizer.sources.fault, at the MLP instead of behind it.\"\"\"
    out = original(self, x)
    return out * {FACTOR} if self.down_proj.prefix.startswith("model.layers.{LAYER}.") else out

def same(original, self, *args, **kwargs):
    return original(self, *args, **kwargs)

def broken(self, x):
    raise ValueError("planted failure")
"""

Answering = Callable[..., Intervened]


@pytest.fixture
def answering(capturing: Capturing, root: Path, tmp_path: Path) -> Answering:
    """Runs an intervention: `patches` are (target, name of the replacement) each."""
    (tmp_path / "change.py").write_text(CHANGE)

    def work(
        name: str,
        *patches: tuple[str, str],
        phase: str | None = None,
        everywhere: bool = False,
        **options: object,
    ) -> Intervened:
        texts = [f"{target}={tmp_path / 'change.py'}:{replacement}" for target, replacement in patches]
        asked = intervention(texts, phase, 1, everywhere=everywhere, keep_prefix_cache=False)
        capture = capturing(name, intervention=asked, **(ROUNDS | options))
        assert verify(capture.folder).state == SOUND
        return judge(load(root, name))

    return work


def test_a_patch_is_localized_and_taken_back(answering: Answering) -> None:
    """The forward of the attention is wrapped by a tap: the replacement must come behind it."""
    attention = "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward"
    answer = answering("patched", (MLP, "scaled"), (attention, "same"), payload="all")
    assert (answer.verdict, answer.reasons) == ("diverged", [])
    first = answer.changed.first
    assert first is not None
    assert (first.request, first.position, first.step) == ("r00.00", 0, STEPS)
    assert first.segment.after == f"model.layers.{LAYER}.self_attn.attn/output"
    assert first.segment.before == f"model.layers.{LAYER + 1}.self_attn.attn/query"
    assert first.class_ == "value"
    assert answer.changed.attribution == "candidate-only"
    assert answer.restored.verdict == "identical"
    assert [phase.reset for phase in answer.phases] == [True, True, True]
    (worker,) = answer.workers
    assert [(change.in_steps, change.outside, change.restored) for change in worker] == [
        (STEPS * LAYERS, 0, True)
    ] * 2


@pytest.mark.slow
def test_a_patch_that_changes_nothing_is_identical(answering: Answering) -> None:
    bound = "vllm.model_executor.layers.layernorm:RMSNorm.forward_cpu"
    answer = answering("no-op", (MLP, "same"), (bound, "same"), everywhere=True)
    assert (answer.verdict, answer.reasons, answer.changed.first) == ("identical", [], None)
    assert answer.changed.coverage.pairs.compared == 63 * 34 + 18 * 3
    mlp, norm = answer.workers[0]
    assert mlp.in_steps == STEPS * LAYERS
    assert norm.in_steps == STEPS * (2 * LAYERS + 1)
    assert (norm.elsewhere, norm.rebound, norm.restored) == (
        ["vllm.model_executor.layers.layernorm:RMSNorm instance._forward_method (17 times)"], True, True,
    )  # fmt: skip


@pytest.mark.slow
def test_what_is_never_called_is_inconclusive(answering: Answering) -> None:
    never = "vllm.model_executor.models.utils:extract_layer_index"
    answer = answering("never", (never, "same"))
    assert answer.verdict == "inconclusive"
    elsewhere, called = answer.reasons
    assert (elsewhere.code, elsewhere.detail) == (codes.NEVER_RAN, codes.ELSEWHERE)
    assert "vllm.model_executor.models.llama:extract_layer_index" in elsewhere.places
    assert (called.code, called.detail) == (codes.NEVER_RAN, codes.NOT_CALLED)


@pytest.mark.slow
def test_the_prefix_cache_is_emptied_for_one_phase(answering: Answering) -> None:
    answer = answering("cache", phase="prefix-cache", prompt_tokens=300)
    assert answer.reasons == []
    assert answer.verdict == answer.changed.verdict
    phases = {phase.name: phase for phase in answer.phases}
    assert list(phases) == ["warm-up", "A1", "B", "A2"]
    assert {name: phase.reset for name, phase in phases.items()} == {
        "warm-up": None, "A1": None, "B": True, "A2": None,
    }  # fmt: skip
    assert phases["B"].cached_first == [0]
    assert all(phases[name].cached_first[0] > 0 for name in ("A1", "A2"))
    assert answer.changed.coverage.rows.candidate > answer.changed.coverage.rows.parent
    assert answer.restored.verdict == "identical"


@pytest.mark.slow
def test_metadata_builders_are_made_again_with_those_of_the_draft(answering: Answering) -> None:
    answer = answering("builders", phase="attention-backend", speculative_model="tiny-eagle3")
    assert (answer.verdict, answer.reasons) == ("identical", [])
    ((change,),) = answer.workers
    assert change.detail == "2 in 2 groups, seen empty, then made again"
    assert change.restored
    assert change.in_steps >= 2 * len(answer.phases)


@pytest.mark.slow
def test_compiled_code_is_not_reached(answering: Answering) -> None:
    answer = answering("compiled-patch", (MLP, "scaled"), engine=COMPILED)
    assert answer.verdict == "inconclusive"
    (limit,) = answer.reasons
    assert limit.detail == codes.COMPILED
    assert answer.changed.verdict == "identical"


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own(answering: Answering) -> None:
    """Patches travel by collective_rpc; a replacement that fails ends the run as that source would."""
    answer = answering("apart", (MLP, "scaled"), environment={})
    assert (answer.verdict, answer.reasons) == ("diverged", [])
    with pytest.raises(CaptureFailed, match=r"ended early in phase B: ValueError: planted failure\."):
        answering("broken", (MLP, "broken"), environment=IN_PROCESS, engine=EAGER)


@pytest.mark.slow
def test_a_mistake_in_a_name_is_told_before_the_first_phase(answering: Answering, root: Path) -> None:
    with pytest.raises(CaptureFailed, match=r"LlamaMLP.fward: there is no 'fward' there; check the name"):
        answering("misspelt", ("vllm.model_executor.models.llama:LlamaMLP.fward", "same"))
    assert len(load(root, "misspelt").table) == 0
