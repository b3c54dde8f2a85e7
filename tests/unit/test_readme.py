"""What the README shows is what the commands print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_example_in_the_readme_is_the_real_output() -> None:
    command = [sys.executable, "-m", "localizer", "diff", "candidate", "parent"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert printed.returncode == 1
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## An example") : readme.index("## A real model")]
    shown = re.findall(r"^    (.+)$", section, re.MULTILINE)
    lines = iter(printed.stdout.splitlines())
    assert len(shown) > 5
    assert all(line in lines for line in shown), "a line is missing or out of order"
