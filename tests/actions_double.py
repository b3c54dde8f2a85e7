"""A test double of GitHub's runner for composite actions: it runs their shell steps as GitHub does, no more.

It knows the expressions that action.yml uses, and refuses others. Steps that use another action are not run:
the test says what they give.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TERM = r"(?:inputs|github|runner|steps)(?:\.[\w-]+)+|'[^']*'"
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
COMPARISON = re.compile(rf"({TERM})\s*(==|!=)\s*({TERM})")


@dataclass
class Runner:
    """One job that uses the action.

    Attributes:
        action: action.yml, parsed.
        folder: the job's workspace.
        inputs: what the workflow gives; the rest are the defaults.
        environment: variables of the job.
        uses: outputs of steps that are not run, by their id.
        ran: names of the steps that were run, in order.
        said: what they printed.
    """

    action: Mapping[str, Any]
    folder: Path
    inputs: Mapping[str, str]
    environment: Mapping[str, str]
    uses: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    said: str = ""

    def __post_init__(self) -> None:
        self.temporary = self.folder / "runner temp"
        self.temporary.mkdir()
        self.summary = self.temporary / "summary"
        self.outputs: dict[str, dict[str, str]] = {}
        unknown = self.inputs.keys() - self.action["inputs"].keys()
        assert not unknown, f"the action has no inputs {unknown}"

    def go(self) -> int:
        """Run the steps; the exit code of the first that fails."""
        for step in self.action["runs"]["steps"]:
            if not self._wanted(step.get("if", "")):
                continue
            self.ran.append(step["name"])
            if "uses" in step:
                self.outputs[step["id"]] = dict(self.uses[step["id"]])
                self.given = {name: self._text(value) for name, value in step["with"].items()}
                continue
            status = self._shell(step)
            if status:
                return status
        return 0

    def output(self, name: str) -> str:
        """An output of the action."""
        return self._text(self.action["outputs"][name]["value"])

    def _shell(self, step: Mapping[str, Any]) -> int:
        assert step["shell"] == "bash"
        script, out = self.temporary / "step.sh", self.temporary / "output"
        script.write_text(step["run"])
        out.write_text("")
        given = {name: self._text(value) for name, value in step.get("env", {}).items()}
        files = {"GITHUB_OUTPUT": str(out), "GITHUB_STEP_SUMMARY": str(self.summary)}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.folder,
            env={**os.environ, **self.environment, **files, **given},
            capture_output=True,
            text=True,
            check=False,
        )
        self.said += done.stdout + done.stderr
        lines = (line.partition("=") for line in out.read_text().splitlines())
        self.outputs[step.get("id", step["name"])] = {name: value for name, _, value in lines}
        return done.returncode

    def _text(self, text: str) -> str:
        return EXPRESSION.sub(lambda found: self._either(found[1]), text)

    def _either(self, expression: str) -> str:
        values = (self._value(term.strip()) for term in expression.split("||"))
        return next((value for value in values if value), "")

    def _wanted(self, condition: str) -> bool:
        for part in condition.split("&&") if condition else []:
            found = COMPARISON.fullmatch(part.strip())
            assert found is not None, f"this double does not know {part}"
            if (self._value(found[1]) == self._value(found[3])) != (found[2] == "=="):
                return False
        return True

    def _value(self, term: str) -> str:
        assert re.fullmatch(TERM, term), f"this double does not know {term}"
        if term.startswith("'"):
            return term[1:-1]
        kind, *names = term.split(".")
        if kind == "inputs":
            (name,) = names
            default = self.action["inputs"][name]["default"]
            return self.inputs[name] if name in self.inputs else self._text(default)
        if kind == "steps":
            step, _, name = names
            return self.outputs.get(step, {}).get(name, "")
        return {"github.workspace": str(self.folder), "runner.temp": str(self.temporary)}[term]
