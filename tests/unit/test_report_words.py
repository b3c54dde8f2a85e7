"""Every reason, signature and blame has its sentence, and a person has read it: tests/gold/words.txt."""

from __future__ import annotations

import golden
from findings import finding

from localizer.diff.localize import BLAMES
from localizer.diff.result import CANDIDATE, Reason, Signature
from localizer.diff.signature import SIGNATURES
from localizer.diff.verdict import REASONS
from localizer.report.patterns import sentence
from localizer.report.wording import blame, reason
from localizer.wire.spec import AUXILIARY, DRAFT, HIDDEN, INPUT_IDS, LOGITS, TOKEN

LAYER = "model.layers.3"
ATTENTION, EXPERTS, MIXER = f"{LAYER}.self_attn.attn", f"{LAYER}.mlp.experts", f"{LAYER}.mixer"

SEGMENTS = (
    (None, INPUT_IDS),
    (f"{ATTENTION}/output", "model.layers.4.self_attn.attn/query"),
    (f"{ATTENTION}/value", f"{ATTENTION}/output"),
    ("model.layers.31.self_attn.attn/output", HIDDEN),
    (HIDDEN, LOGITS),
    (LOGITS, TOKEN),
    (None, f"{ATTENTION}/query"),
    (INPUT_IDS, f"{AUXILIARY}/0"),
    (DRAFT + INPUT_IDS, f"{DRAFT}model.layers.8.self_attn.attn/query"),
    (f"{EXPERTS}/expert_ids", f"{EXPERTS}/output"),
    (f"{EXPERTS}/router_logits", f"{EXPERTS}/expert_ids"),
    (f"{MIXER}/projected_states", f"{MIXER}/output"),
)
"""(after, before) of a segment of each kind, in the order of `BLAMES`."""


def test_every_code_is_told_as_expected() -> None:
    found = [finding(*ends) for ends in SEGMENTS]
    assert [item.blame for item in found] == list(BLAMES)
    reasons = [Reason(code=code, source=CANDIDATE, detail="so it is", count=3) for code in REASONS]
    patterns = [Signature(code=code, rows=3, equal_rows=8, number=4, heads=[1, 2]) for code in SIGNATURES]
    lines = [f"reason {item.code}: {reason(item)}" for item in reasons]
    lines += [f"signature {item.code}: {sentence(item)}" for item in patterns]
    lines += [f"blame {item.blame}: {blame(item)}" for item in found]
    golden.check("words.txt", "\n".join(lines) + "\n")
