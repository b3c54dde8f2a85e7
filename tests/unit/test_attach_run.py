"""`localize attach --run`: the captures of a run, and what the run said, in one archive and one comment."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import golden
import msgspec
import pytest
from altered import describe
from builders import Plan, pair
from click.testing import CliRunner
from doubles import FAULT, OTHER_TOKEN, Vllm, candidates, going
from evidence import stable
from markup import live, parsed

from localizer.cli.main import localize
from localizer.diff import diff
from localizer.diff.result import Reason
from localizer.errors import LocalizerError
from localizer.report import history
from localizer.report import run as report
from localizer.report.comment import whole
from localizer.run import attached
from localizer.run.attach import attach
from localizer.run.attached import OfRun, file_name, of_run, read
from localizer.run.config import Config
from localizer.store import pack, runs
from localizer.store.reader import Capture
from localizer.store.verify import SOUND, verify_archive


@pytest.fixture
def root(config: Config, tmp_path: Path) -> Path:
    """The captures of a run that found a fault."""
    going(config, tmp_path, Vllm(candidates(**FAULT)))
    return tmp_path / "captures"


def packed(found: OfRun, path: Path, **options: Any) -> str:
    given = {"limit": 25_000_000, "redact": True, "run": found.facts} | options
    attach(found.candidate, found.parent, found.controls, path, **given)
    return whole(read(path))


def test_it_takes_the_captures_that_the_run_reports(root: Path, tmp_path: Path) -> None:
    found = of_run(root, None)
    assert found.candidate.label == "candidate-witness/0001"
    assert found.parent.label == "parent-witness/0001"
    assert [it.label for it in found.controls] == ["parent-2/0001"]
    text = packed(found, tmp_path / "x.zip")
    assert verify_archive(tmp_path / "x.zip").state == SOUND
    seconds = [step.seconds for step in found.facts.steps]
    assert all(seconds)
    here = re.compile(r"(?<=vLLM `)[^`]+(?=`; torch)|(?<=torch `)[^`]+|(?<=Python `)[^`]+")  # this machine's
    golden.check("comment-run.md", here.sub("...", stable(text)))
    for told in (
        "taps are neutral on the candidate",
        "the parent is reproducible",
        "reproduced",
        "Token parity, without taps",
    ):
        assert told in text
    shell = [it for it in parsed(text) if it.type == "fence"]
    assert "localize capture candidate-witness" in shell[0].content


def test_the_verdict_is_that_of_the_run(config: Config, tmp_path: Path) -> None:
    vllm = Vllm(lambda name, _: OTHER_TOKEN if "candidate-untapped" in name else {})
    going(config, tmp_path, vllm)
    text = packed(of_run(tmp_path / "captures", None), tmp_path / "x.zip")
    assert text.splitlines()[2] == "## localizer: inconclusive"
    assert "the observer is not neutral" in text
    parity = re.search(r"Token parity, without taps: 1/3 requests, \d positions of 12 differ", text)
    assert parity is not None


def test_no_token_and_no_path_of_the_run_is_told(root: Path, tmp_path: Path) -> None:
    (folder,) = runs.folders(root)
    tree = json.loads((folder / runs.RESULT).read_text())
    tree["reasons"] = [{"code": "incomplete", "source": "parent", "detail": "/home/zaphod/x", "count": 0}]
    tree["parity"]["first"] = {
        "request": "r01.00", "position": 4, "output_index": 1, "measured": "logits",
        "candidate": {"token": 424242, "top": None}, "parent": {"token": 434343, "top": None},
    }  # fmt: skip
    (folder / runs.RESULT).write_text(json.dumps(tree))
    text = packed(of_run(root, 1), tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        told = text + archive.read("run.json").decode()
    assert not [word for word in ("zaphod", "424242", "434343", str(tmp_path)) if word in told]


def test_what_a_run_says_in_a_strangers_archive_is_text(root: Path, tmp_path: Path) -> None:
    packed(of_run(root, None), tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != pack.CHECKSUMS}
    tree = json.loads(members["run.json"])
    nasty = "</details> @octocat #1 `x` https://evil.example \u202e"
    for step in tree["steps"]:
        step["capture"] = step["step"] = nasty
    for item in (*tree["untapped"], *tree["observer"], *tree["repeats"]):
        item["one"] = item["other"] = item["source"] = nasty
    for item in tree["compiled"]:
        item["one"], item["equal"] = nasty, True
    tree["reasons"] = [{"code": nasty, "source": nasty, "detail": nasty, "count": 3}]
    tree["witness"]["tries"][0]["candidate"]["capture"] = nasty
    members["run.json"] = json.dumps(tree).encode()
    pack.write(tmp_path / "y.zip", members)
    text = history.RECORDS.sub("", whole(read(tmp_path / "y.zip")).removeprefix(history.MARKER))
    assert [it for it in live(text) if it != "html_block"] == []
    strange = [{**tree["untapped"][0], "differs": "x"}]
    wrongs: list[Any] = [{}, {"kind": "x"}, {**tree, "verdict": "fine"}, {**tree, "untapped": strange}, [], 3]
    wrongs += [{**tree, "parity": 3}, {**tree, "observer": tree["observer"] * 2}]
    for wrong in wrongs:
        members["run.json"] = json.dumps(wrong).encode()
        pack.write(tmp_path / "y.zip", members)
        with pytest.raises(LocalizerError, match="run\\.json is no result of a run"):
            read(tmp_path / "y.zip")


def test_runs_that_cannot_be_attached(root: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalizerError, match="holds no runs"):
        of_run(tmp_path / "nothing", None)
    with pytest.raises(LocalizerError, match=r"There is no run 3 in .*; there are: 1"):
        of_run(root, 3)
    manifest = root / "candidate-witness" / "0001" / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(LocalizerError, match="candidate-witness/0001 is not the capture"):
        of_run(root, 1)
    (folder,) = runs.folders(root)
    for text in ("{}", "[", '{"diff": 3}', "null"):
        (folder / runs.RESULT).write_text(text)
        with pytest.raises(LocalizerError, match="is no result of a run"):
            of_run(root, 1)
    (folder / runs.RESULT).unlink()
    with pytest.raises(LocalizerError, match="is not finished"):
        of_run(root, 1)


def test_the_command(root: Path, tmp_path: Path) -> None:
    def call(*arguments: str) -> Any:
        return CliRunner().invoke(localize, ["attach", *arguments, "--out", str(root)])

    done = call("--run", "-o", str(tmp_path / "x.zip"))
    assert (done.exit_code, (tmp_path / "x.md").read_text().count("What the runs say")) == (0, 1), done.output
    assert call("--run", "1", "-o", str(tmp_path / "y.zip")).exit_code == 0
    assert (tmp_path / "x.zip").read_bytes() == (tmp_path / "y.zip").read_bytes()
    again = call(str(tmp_path / "x.zip"), "--comment", "-")
    assert again.output == (tmp_path / "x.md").read_text()
    for wrong in (
        *(("--run", "x"), ("--run", "1", "candidate", "parent"), ("--run", "1", "--control", "parent"), ()),
        *(("x.zip", "--control", "y"), ("x.zip", "-o", "z.zip"), ("candidate", "parent", "--dry-run")),
    ):
        assert call(*wrong).exit_code == 2, wrong


def test_another_file_of_that_name_is_left_alone(root: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    asked = ["attach", "--run", "-o", str(tmp_path / "README.zip"), "--out", str(root)]
    done = CliRunner().invoke(localize, asked)
    assert isinstance(done.exception, LocalizerError)
    assert "no comment of localizer" in str(done.exception)
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    "url",
    ["x", "javascript:alert(1)", "https://a b", "https://a>b", "https://a\n", "https://a`", "https://<"],
)
def test_addresses_that_are_none(root: Path, tmp_path: Path, url: str) -> None:
    done = CliRunner().invoke(localize, ["attach", "--run", "--attachment-url", url, "--out", str(root)])
    assert isinstance(done.exception, LocalizerError)


def test_the_archive_lies_here_whatever_a_capture_is_called(tmp_path: Path) -> None:
    folders = pair(tmp_path, Plan())
    path = folders[0] / "open.json"
    path.write_text(path.read_text().replace('"name": "candidate"', '"name": "../../x"'))
    describe(folders[0])
    captures = [Capture(folder) for folder in folders]
    assert captures[0].open.name == "../../x"
    assert file_name(*captures) == Path("candidate-parent.zip")


def test_the_report_of_a_run_as_markdown(config: Config, tmp_path: Path) -> None:
    result, _ = going(config, tmp_path, Vllm(lambda name, _: {}))
    stream = io.StringIO()
    report.render("markdown", result, stream)
    assert live(stream.getvalue()) == []
    assert stream.getvalue().startswith("## identical: every one of")


def test_a_run_claims_no_more_than_its_captures_show(root: Path, tmp_path: Path) -> None:
    packed(of_run(root, None), tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != pack.CHECKSUMS}
    tree = json.loads(members["run.json"])
    assert tree["verdict"] == "diverged"

    def told(name: str, **changes: Any) -> str:
        altered = members | {"run.json": json.dumps(tree | changes).encode()}
        pack.write(tmp_path / name, altered)
        return whole(read(tmp_path / name))

    with pytest.raises(LocalizerError, match="says identical where the captures say diverged"):
        told("identical.zip", verdict="identical", reasons=[])
    unsteady = [{**tree["observer"][0], "differs": "tokens"}]
    with pytest.raises(LocalizerError, match="says diverged where the captures say inconclusive"):
        told("observed.zip", observer=unsteady)
    assert "## localizer: inconclusive" in told("less.zip", verdict="inconclusive")


def test_a_run_drops_no_reason_of_its_captures(config: Config, tmp_path: Path) -> None:
    going(config, tmp_path, Vllm(lambda name, _: {}))
    found = of_run(tmp_path / "captures", None)
    incomplete = [Reason(code="incomplete-capture", source="candidate", detail="x")]
    result = msgspec.structs.replace(
        diff(found.candidate, found.parent), verdict="inconclusive", reasons=incomplete
    )
    with pytest.raises(ValueError, match="says identical where the captures say inconclusive"):
        attached._run(found.facts, result)
    facts = msgspec.structs.replace(found.facts, verdict="inconclusive", reasons=[])
    assert attached._run(facts, result).reasons == incomplete
