"""`localize run` on captures that a double makes: reproducibility, observer, witness, pinning, resuming.

That real ones go the same way is held by tests/integration/test_run.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import Plan, attention, bump, drafted, put, write
from click.testing import CliRunner
from doubles import FAULT, OTHER_TOKEN, OTHER_VERSION, QUERY, Broken, Vllm, candidates, going, text_of

from localizer.cli.main import localize
from localizer.errors import CaptureFailed, LocalizerError
from localizer.report.captures import history
from localizer.run.config import Config
from localizer.store import runs
from localizer.wire.spec import LOGITS


def test_a_fault_is_found_attributed_and_witnessed(config: Config, tmp_path: Path) -> None:
    vllm = Vllm(candidates(**FAULT))
    found, watcher = going(config, tmp_path, vllm)
    assert (found.verdict, found.attribution, found.reasons) == ("diverged", "candidate-only", [])
    assert found.first is not None
    assert (found.first.site, found.first.request, found.first.position) == (QUERY[2], QUERY[0], QUERY[1])
    assert found.first.max_ulp == 1, "the witness pass keeps payload"
    assert found.first_pass.first is not None
    assert found.first_pass.first.max_ulp is None, "the first pass does not"
    assert vllm.made == [
        *("parent-untapped", "parent-untapped-2", "candidate-untapped", "candidate-untapped-2"),
        *("parent", "parent-2", "candidate", "candidate-2", "parent-witness", "candidate-witness"),
    ]
    assert [step.capture for step in found.steps] == [f"{name}/0001" for name in vllm.made]
    assert [way.request for way in found.witness.ways] == ["r01.00"]  # type: ignore[union-attr]
    assert vllm.requests[-1].rows == ["r01.00:0-4"]
    assert {request.logprobs for request in vllm.requests} == {2}
    assert any("overlay" in item.setting for item in watcher.found)
    said = text_of(tmp_path)
    assert said.startswith(
        "diverged: first at model.layers.1.self_attn.attn/query, request r01.00, position 4"
    )
    assert "taps are neutral on the candidate" in said
    assert "came again, byte for byte, in a second pass" in said


def test_nothing_differs(config: Config, tmp_path: Path) -> None:
    vllm = Vllm(candidates())
    found, _ = going(config, tmp_path, vllm)
    assert (found.verdict, found.witness) == ("identical", None)
    assert "candidate-witness" not in vllm.made


def test_a_source_that_is_not_reproducible(config: Config, tmp_path: Path) -> None:
    vllm = Vllm(lambda name, number: OTHER_TOKEN if name == "parent-untapped-2" else {})
    found, _ = going(config, tmp_path, vllm)
    assert found.verdict == "identical"
    assert [(reason.code, reason.source) for reason in found.reasons] == [
        ("source-not-reproducible", "parent")
    ]
    assert [item.source for item in found.observer] == ["candidate"], "of the parent it cannot be told"
    assert "whether taps are neutral on the parent cannot be told" in text_of(tmp_path)


def test_noise_is_not_laid_to_the_observer(config: Config, tmp_path: Path) -> None:
    """A run with taps returned something else, and another one with taps did not."""
    found, _ = going(config, tmp_path, Vllm(lambda name, number: OTHER_TOKEN if name == "candidate" else {}))
    assert {(it.code, it.source) for it in found.reasons} == {
        ("source-not-reproducible", "candidate"),
        ("witness-not-reproduced", None),
    }
    assert [item.source for item in found.observer] == ["parent"]
    assert "whether taps are neutral on the candidate cannot be told" in text_of(tmp_path)


def test_an_observer_that_is_not_neutral(config: Config, tmp_path: Path) -> None:
    vllm = Vllm(lambda name, number: OTHER_TOKEN if "candidate-untapped" in name else {})
    found, _ = going(config, tmp_path, vllm)
    assert (found.verdict, found.first_pass.verdict) == ("inconclusive", "identical")
    assert [(reason.code, reason.source) for reason in found.reasons] == [
        ("observer-not-neutral", "candidate")
    ]
    assert found.parity.tokens.requests_differ == 1, "of the runs without taps"
    assert text_of(tmp_path).startswith("inconclusive: the observer is not neutral")


def test_log_probabilities_tell_more_than_tokens(config: Config, tmp_path: Path) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        value = -0.5 if name in ("candidate-untapped", "candidate-untapped-2") else -0.25
        return {"logprobs": {"r01.00": [[[3, value], [4, -2.0]]] * 4}}

    found, _ = going(config, tmp_path, Vllm(makes))
    assert found.verdict == "inconclusive"
    (item,) = [item for item in found.observer if item.differs != "same"]
    assert (item.differs, item.logprobs_compared, item.logprobs_differ) == ("logprobs", 4, 4)
    assert "equal tokens, but other log probabilities at 4 of 4 positions" in text_of(tmp_path)


def test_a_witness_that_never_comes_again(config: Config, tmp_path: Path) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        changes = {QUERY: bump(ulps=len(name) if "witness" in name else 1)}
        return {"changes": changes} if name.startswith("candidate") else {}

    vllm = Vllm(makes)
    found, _ = going(config, tmp_path, vllm)
    assert (found.verdict, found.first_pass.verdict) == ("inconclusive", "diverged")
    assert [(reason.code, reason.count) for reason in found.reasons] == [("witness-not-reproduced", 3)]
    assert vllm.made[-2:] == ["parent-witness-3", "candidate-witness-3"], "all attempts are kept"
    assert found.first is not None, "the differences stay listed"
    assert "NOT reproduced: 1 of" in text_of(tmp_path)


def test_a_witness_that_comes_again_the_second_time(config: Config, tmp_path: Path) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        changes = {QUERY: bump(ulps=5 if name == "candidate-witness" else 1)}
        return {"changes": changes} if name.startswith("candidate") else {}

    found, _ = going(config, tmp_path, Vllm(makes))
    assert found.verdict == "diverged"
    assert [item.reproduced for item in found.witness.tries] == [False, True]  # type: ignore[union-attr]
    assert found.diff.captures.candidate.label == "candidate-witness-2/0001"


def test_both_the_first_token_and_the_first_row_are_witnessed(config: Config, tmp_path: Path) -> None:
    changes = {("r01.00", 2, QUERY[2]): bump(), ("r01.01", 3, LOGITS): put(9.0, (7,))}
    vllm = Vllm(candidates(changes=changes, outputs={"r01.01": [2, 7, 7, 7]}))
    found, _ = going(config, tmp_path, vllm)
    assert found.witness is not None
    assert {(way.request, way.why) for way in found.witness.ways} == {("r01.01", "token"), ("r01.00", "site")}
    assert found.parity.first is not None
    assert found.parity.first.request == "r01.01"


def test_kv_blocks_that_differ_are_pinned_and_all_is_run_again(config: Config, tmp_path: Path) -> None:
    vllm = Vllm(lambda name, number: {"blocks": 64 if name.startswith("parent") else 60})
    found, watcher = going(config, tmp_path, vllm)
    assert (found.verdict, found.pinned, set(found.kv_blocks.values())) == ("identical", 60, {60})
    assert any("60 and 64 blocks" in text for text in watcher.said)
    assert len(found.steps) == 8, "the superseded captures are kept, but not part of the answer"
    said = text_of(tmp_path)
    assert "all runs were made with 60" in said
    assert "64 in parent-untapped/0001" in said
    assert "60 in candidate-untapped/0001" in said
    assert found.kv_blocks_before["parent-untapped/0001"] == 64
    first = found.differences[0]
    assert (first.setting, first.candidate, first.parent) == ("num_kv_blocks before it was set", "60", "64")
    assert "num_kv_blocks before it was set" in said[said.index("What else differs") :].split("\n\n")[0]
    assert "KV cache blocks that they have by themselves" in said


def test_a_source_that_keeps_its_number_of_kv_blocks_is_not_passed_over(
    config: Config, tmp_path: Path
) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        return {"blocks": 64, "ignores": True} if name.startswith("parent") else {"blocks": 60}

    found, _ = going(config, tmp_path, Vllm(makes))
    assert (found.verdict, found.first_pass.verdict) == ("inconclusive", "identical")
    assert [(it.code, it.source, it.count) for it in found.reasons] == [("kv-blocks-not-set", "parent", 4)]
    said = text_of(tmp_path)
    assert said.startswith("inconclusive: the parent did not take the number of KV cache blocks")
    assert "they were to be 60, and are 64 in parent-untapped/0002" in said


def test_the_numbers_of_both_sources_are_known_before_one_is_set(config: Config, tmp_path: Path) -> None:
    numbers = {"parent-untapped": 64, "parent-untapped-2": 63, "candidate-untapped": 50}
    vllm = Vllm(lambda name, number: {"blocks": numbers.get(name, 64)})
    found, _ = going(config, tmp_path, vllm)
    assert (found.pinned, found.differences[0].parent) == (50, "63, 64")


def test_kv_blocks_that_were_asked_for_stay(config: Config, tmp_path: Path) -> None:
    candidate = msgspec.structs.replace(config.candidate, engine={"num_gpu_blocks_override": 32})
    found, _ = going(msgspec.structs.replace(config, candidate=candidate), tmp_path, Vllm(candidates()))
    assert (found.pinned, set(found.kv_blocks.values())) == (None, {32, 64})
    assert "running.num_kv_blocks" in {item.setting for item in found.diff.differences} or any(
        item.setting == "engine.num_gpu_blocks_override" for item in found.diff.differences
    )


def test_a_witness_may_see_further_up_than_the_first_pass(config: Config, tmp_path: Path) -> None:
    """The first pass records the last layer; the witness, of all, finds the fault before it."""
    last = "r01.00", 4, attention(2, "query")

    def makes(name: str, number: int) -> dict[str, Any]:
        layers = {} if "witness" in name else {"layers": (2,), "observed": "2"}
        faults = {last: bump()} | ({QUERY: bump()} if "witness" in name else {})
        return layers | ({"changes": faults} if name.startswith("candidate") else {})

    found, _ = going(config, tmp_path, Vllm(makes))
    assert found.witness is not None
    assert found.witness.reproduced
    assert found.first_pass.first is not None
    assert found.first_pass.first.site == last[2]
    assert found.first is not None
    assert found.first.site == QUERY[2]
    assert (found.verdict, found.attribution) == ("diverged", "candidate-only")
    assert found.diff.attribution == "no-control", "no control recorded that layer"
    assert "At the first difference of the first pass:" in text_of(tmp_path)


def test_an_interrupted_run_resumes(config: Config, tmp_path: Path) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        if name == "candidate" and number == 1:
            raise Broken
        return FAULT if name.startswith("candidate") else {}

    with pytest.raises(Broken):
        going(config, tmp_path, Vllm(makes))
    again = Vllm(lambda name, number: FAULT if name.startswith("candidate") else {})
    found, watcher = going(config, tmp_path, again)
    assert again.made == ["candidate", "candidate-2", "parent-witness", "candidate-witness"]
    assert [step.resumed for step in found.steps] == [True] * 6 + [False] * 4
    assert any(text.startswith("Resuming") for text in watcher.said)
    third = Vllm(candidates())
    found, _ = going(config, tmp_path, third)
    assert len(third.made) == 8, "a finished run is not resumed"


def test_it_does_not_resume_what_has_changed(config: Config, tmp_path: Path) -> None:
    def fails(name: str, number: int) -> dict[str, Any]:
        if name == "candidate":
            raise CaptureFailed("no")
        return {}

    with pytest.raises(CaptureFailed):
        going(config, tmp_path, Vllm(fails))
    (tmp_path / "overlay" / "vllm" / "extra.py").write_text("changed = True")
    vllm = Vllm(candidates())
    going(config, tmp_path, vllm)
    assert len(vllm.made) == 8


def test_one_run_of_a_kind_at_a_time(config: Config, tmp_path: Path) -> None:
    """While one is carried out the same is refused, fresh or not; another one works beside it."""
    other = msgspec.structs.replace(config, environment={"NOBODY_READS_THIS": "1"})
    refused, beside = [], []

    def makes(name: str, number: int) -> dict[str, Any]:
        if name == "parent" and not beside:
            for fresh in (False, True):
                with pytest.raises(LocalizerError, match=r"Another localize run .*wait until") as error:
                    going(config, tmp_path, Vllm(candidates()), fresh)
                refused.append(error.value.exit_code)
            beside.append(None)
            beside.append(going(other, tmp_path, Vllm(candidates()))[0])
        return FAULT if name.startswith("candidate") else {}

    vllm = Vllm(makes)
    found, _ = going(config, tmp_path, vllm)
    assert refused == [2, 2]
    assert beside[1] is not None
    assert (found.verdict, beside[1].verdict) == ("diverged", "identical")
    labels = [step.capture for step in (*found.steps, *beside[1].steps)]
    assert len(set(labels)) == len(labels), "no capture is in both"
    assert len(runs.folders(tmp_path / "captures")) == 2


def test_two_runs_share_no_compiled_code(config: Config, tmp_path: Path) -> None:
    compiled = msgspec.structs.replace(config, engine={})
    places = []
    for fresh in (False, True):
        vllm = Vllm(candidates())
        going(compiled, tmp_path, vllm, fresh)
        places.append({request.compile_cache for request in vllm.requests})
    assert not places[0] & places[1]
    assert all(place is not None and place.is_absolute() for place in places[0] | places[1])


def test_the_record_keeps_no_secrets(config: Config, tmp_path: Path) -> None:
    secret = msgspec.structs.replace(config, environment={"HF_TOKEN": "hush", "OMP_NUM_THREADS": "2"})
    going(secret, tmp_path, Vllm(candidates()))
    (folder,) = runs.folders(tmp_path / "captures")
    assert not any(b"hush" in path.read_bytes() for path in folder.iterdir() if path.is_file())
    assert b'"OMP_NUM_THREADS": "2"' in (folder / runs.RUN).read_bytes()


def test_drafts_that_propose_something_else_are_no_repetition(config: Config, tmp_path: Path) -> None:
    """Logits that are level have no greatest: what is proposed from them may differ where no site does."""
    level = {("r00.00", 7, drafted(LOGITS, 3)): put(0.0, (slice(None),))}  # type: ignore[dict-item]

    def makes(name: str, number: int) -> dict[str, Any]:
        proposals = {("r00.00", 5): (9, 11, 13)} if name == "candidate-2" else {}
        tapped = {} if "untapped" in name else {"speculate": 3, "changes": level, "proposals": proposals}
        return {"matrix": (2,), "max_tokens": 10} | tapped

    workload = msgspec.structs.replace(config.workload, speculative_model="tiny-eagle3")
    found, _ = going(msgspec.structs.replace(config, workload=workload), tmp_path, Vllm(makes))
    (item,) = (item for item in found.repeats if item.source == "candidate")
    assert (item.differs, item.pairs_differ, item.proposals_differ) == ("rows", 0, 1)
    assert (found.verdict, found.first_pass.verdict) == ("inconclusive", "identical")
    assert "but proposed other tokens from 1 draft row" in text_of(tmp_path)


def test_without_untapped_runs_nothing_is_said_of_the_observer(config: Config, tmp_path: Path) -> None:
    passes = msgspec.structs.replace(config.run, untapped=0, controls=0, repeats=0, witness_tries=0)
    vllm = Vllm(candidates(**FAULT))
    found, _ = going(msgspec.structs.replace(config, run=passes), tmp_path, vllm)
    assert vllm.made == ["parent", "candidate"]
    assert (found.verdict, found.attribution, found.parity.tapped) == ("diverged", "no-control", True)
    said = text_of(tmp_path)
    assert "whether taps are neutral was not looked at" in said
    assert "Whether taps change what both sources compute" in said


def test_compiled_arms_have_a_cache_each(config: Config, tmp_path: Path) -> None:
    compiled = msgspec.structs.replace(config, engine={})
    vllm = Vllm(candidates(**FAULT))
    found, _ = going(compiled, tmp_path, vllm)
    by_name = {request.name: request.compile_cache for request in vllm.requests}
    assert all(by_name.values())
    assert by_name["parent"] == by_name["parent-untapped"] == by_name["parent-witness"]
    assert len({by_name[name] for name in ("parent", "parent-2", "candidate")}) == 3
    assert (found.compile_cache, found.attribution) == ("own", "candidate-only")
    shared = msgspec.structs.replace(
        compiled, run=msgspec.structs.replace(config.run, compile_cache="shared")
    )
    vllm = Vllm(candidates(**FAULT))
    found, _ = going(shared, tmp_path, vllm)
    assert {request.compile_cache for request in vllm.requests} == {None}
    assert (found.compile_cache, found.attribution) == ("shared", "no-control")
    assert "controls attribute nothing" in text_of(tmp_path)


def test_the_result_is_json_and_is_listed(config: Config, tmp_path: Path) -> None:
    going(config, tmp_path, Vllm(candidates(**FAULT)))
    (folder,) = runs.folders(tmp_path / "captures")
    tree = json.loads((folder / runs.RESULT).read_text())
    docs = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
    assert (tree["schema"], tree["kind"], tree["verdict"]) == (1, "run", "diverged")
    assert all(f"`{key}`" in docs for key in tree)
    lines = history(tmp_path / "captures").splitlines()
    (line,) = (line for line in lines if line.startswith("runs/"))
    assert line.split()[-2:] == ["10", "diverged"]


def test_a_witness_that_lacks_the_difference_is_not_reproduced(config: Config, tmp_path: Path) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        lacks = {"absent": frozenset({QUERY}), "state": "incomplete"} if "witness" in name else {}
        return FAULT | lacks if name.startswith("candidate") else {}

    found, _ = going(config, tmp_path, Vllm(makes))
    assert (found.verdict, [reason.code for reason in found.reasons]) == (
        "inconclusive",
        ["witness-unfinished"],
    )
    assert "1 row × site pair of the first pass are missing" in text_of(tmp_path)


def test_tokens_that_differ_without_taps_are_never_identical(config: Config, tmp_path: Path) -> None:
    """The candidate does not repeat itself without taps, and with taps nothing differs."""
    vllm = Vllm(lambda name, number: OTHER_TOKEN if name == "candidate-untapped" else {})
    found, _ = going(config, tmp_path, vllm)
    assert (found.verdict, found.first_pass.verdict, found.first) == ("diverged", "identical", None)
    assert [reason.code for reason in found.reasons] == ["outputs-differ", "source-not-reproducible"]
    assert text_of(tmp_path).startswith("diverged: returned tokens or log probabilities differ")


def test_a_candidate_that_differs_from_itself_by_rows_is_not_identical(
    config: Config, tmp_path: Path
) -> None:
    found, _ = going(config, tmp_path, Vllm(lambda name, number: FAULT if name == "candidate-2" else {}))
    assert (found.verdict, found.first_pass.verdict) == ("inconclusive", "identical")
    assert [(reason.code, reason.source) for reason in found.reasons] == [
        ("source-not-reproducible", "candidate")
    ]
    assert "but differ at 1 of" in text_of(tmp_path)


def test_log_probabilities_of_the_two_sources_are_compared(config: Config, tmp_path: Path) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        value = -0.5 if name.startswith("candidate") else -0.25
        return {"logprobs": {"r01.00": [[[3, value], [4, -2.0]]] * 4}}

    found, _ = going(config, tmp_path, Vllm(makes))
    assert (found.verdict, [reason.code for reason in found.reasons]) == ("diverged", ["outputs-differ"])
    assert "log probabilities differ at 4 of 4 positions" in text_of(tmp_path)


def test_log_probabilities_that_only_one_run_returned_differ(config: Config, tmp_path: Path) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        some = [[[3, -0.5], [4, -2.0]]] * (2 if name == "candidate-untapped-2" else 4)
        return {"logprobs": {"r01.00": some}}

    found, _ = going(config, tmp_path, Vllm(makes))
    (item,) = (item for item in found.untapped if item.different)
    assert (item.source, item.logprobs_compared, item.logprobs_differ) == ("candidate", 4, 2)


def test_a_source_that_changes_during_the_run_is_noticed(config: Config, tmp_path: Path) -> None:
    vllm = Vllm(lambda name, number: {"vllm": OTHER_VERSION} if name == "candidate" else {})
    with pytest.raises(LocalizerError, match="what it was when the run began"):
        going(config, tmp_path, vllm)


def test_a_capture_that_was_replaced_is_made_anew(config: Config, tmp_path: Path) -> None:
    def fails(name: str, number: int) -> dict[str, Any]:
        if name == "candidate":
            raise Broken
        return {}

    with pytest.raises(Broken):
        going(config, tmp_path, Vllm(fails))
    folder = tmp_path / "captures" / "parent-untapped" / "0001"
    shutil.rmtree(folder)
    write(tmp_path / "captures", Plan(name="parent-untapped", max_tokens=2))
    again = Vllm(candidates())
    going(config, tmp_path, again)
    assert again.made[0] == "parent-untapped"


@pytest.mark.parametrize("text", ["[" * 100_000, "", "{}", '{"verdict": 3}', "\x00"])
def test_damaged_records_of_runs_are_listed(config: Config, tmp_path: Path, text: str) -> None:
    going(config, tmp_path, Vllm(candidates()))
    (folder,) = runs.folders(tmp_path / "captures")
    (folder / runs.RESULT).write_text(text)
    (folder / runs.STEPS).write_text(text)
    assert "not finished" in history(tmp_path / "captures")
    (folder / runs.RUN).write_text(text)
    assert "damaged" in history(tmp_path / "captures")


@pytest.mark.parametrize("text", ["x = [", "workload = 3", "[workload]\nmodel = 'x'\n\"\\u001b[31m\" = 1"])
def test_bisect_passes_over_what_cannot_be_judged(tmp_path: Path, text: str) -> None:
    (tmp_path / "localize.toml").write_text(text)
    asked = ["run", str(tmp_path / "localize.toml"), "--bisect", "--out", str(tmp_path / "captures")]
    done = CliRunner().invoke(localize, asked)
    assert done.exit_code == 125, "2 would be a bad commit"
    assert "\x1b" not in done.output
    assert CliRunner().invoke(localize, [*asked, "--set", "nonsense"]).exit_code == 125
