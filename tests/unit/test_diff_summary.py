"""The first difference in brief, and its rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from builders import Plan, attention, bump, pair
from findings import finding

from localizer.diff import diff, localize
from localizer.diff.result import NO_CONTROL, FedBy, KeyValueRows, Result, Unobserved
from localizer.diff.summary import summarize
from localizer.store.reader import Capture
from localizer.wire.spec import DRAFT, HIDDEN, INPUT_IDS, LOGITS, TOKEN


def layer(number: int, kind: str) -> str:
    return f"model.layers.{number}.self_attn.attn/{kind}"


def read(equal: int, differ: int, unknown: int) -> KeyValueRows:
    return KeyValueRows(positions=equal + differ + unknown, equal=equal, differ=differ, not_compared=unknown)


def fed(equal: int, differ: int, unknown: int) -> FedBy:
    return FedBy(draft_step=0, position=5, sites=["x"], equal=equal, differ=differ, not_compared=unknown)


@pytest.mark.parametrize(
    ("after", "before", "more", "inputs"),
    [
        (layer(5, "value"), layer(5, "output"), {"key_value": read(4, 0, 0)}, "identical"),
        (layer(5, "value"), layer(5, "output"), {"key_value": read(3, 0, 1)}, "partly-compared"),
        (layer(5, "value"), layer(5, "output"), {"key_value": read(3, 1, 0)}, "different"),
        (
            layer(5, "query"),
            layer(5, "output"),
            {"unobserved": Unobserved(sites=[layer(5, "key")])},
            "partly-compared",
        ),
        (layer(4, "output"), layer(5, "query"), {}, "partly-compared"),  # the residual stream is no site
        (layer(31, "output"), HIDDEN, {}, "partly-compared"),
        (INPUT_IDS, layer(0, "query"), {}, "identical"),
        (INPUT_IDS, layer(2, "query"), {"unobserved": Unobserved(layers=[0, 1])}, "partly-compared"),
        (INPUT_IDS, HIDDEN, {"unobserved": Unobserved(later_layers=True)}, "partly-compared"),
        (HIDDEN, LOGITS, {}, "identical"),
        (LOGITS, TOKEN, {}, "identical"),
        (None, INPUT_IDS, {}, "different"),
        (None, layer(0, "query"), {}, "not-compared"),
        (DRAFT + INPUT_IDS, DRAFT + layer(4, "query"), {"fed_by": fed(3, 0, 0)}, "identical"),
        (DRAFT + INPUT_IDS, DRAFT + layer(4, "query"), {"fed_by": fed(0, 0, 3)}, "partly-compared"),
        (DRAFT + INPUT_IDS, DRAFT + layer(4, "query"), {"fed_by": fed(2, 1, 0)}, "different"),
    ],
)
def test_what_is_known_of_the_inputs(
    after: str | None, before: str, more: dict[str, object], inputs: str
) -> None:
    found = summarize(finding(after, before, **more), NO_CONTROL)
    assert found is not None
    assert found.inputs == inputs


def test_without_a_first_difference_there_is_no_summary() -> None:
    assert summarize(None, NO_CONTROL) is None


def compared(root: Path, **candidate: object) -> Result:
    one, other = pair(root, Plan(), **candidate)
    return diff(Capture(one), Capture(other))


def test_a_summary_says_what_the_finding_says(tmp_path: Path) -> None:
    result = compared(tmp_path, changes={("r01.01", 4, attention(1, "query")): bump((2, 1), 5)})
    assert result.first is not None
    assert result.summary is not None
    first, brief = msgspec.to_builtins(result.first), msgspec.to_builtins(result.summary)
    for name in set(first) & set(brief) - {"heads"}:
        assert brief[name] == first[name]
    assert (brief["layer"], brief["heads"], brief["control"]) == (1, [2], result.attribution)


def test_the_rows_of_the_first_site_in_causal_order(tmp_path: Path) -> None:
    site = attention(1, "query")
    changes = {
        ("r01.01", 4, site): bump((0, 0), 3),
        ("r00.00", 4, site): bump((1, 0)),
        ("r00.00", 2, site): bump((0, 0), 40),
        ("r00.00", 2, attention(2, "key")): bump(),
    }
    rows = compared(tmp_path, changes=changes).first_rows
    assert [(row.request, row.position, row.kind, row.class_, row.max_ulp) for row in rows] == [
        ("r00.00", 2, "prefill", "value", 40),
        ("r00.00", 4, "decode", "1-ulp", 1),
        ("r01.01", 4, "decode", "k-ulp", 3),
    ]
    assert {row.elements_differ for row in rows} == {1}
    assert all(row.max_abs and row.cosine for row in rows)


def test_many_rows_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localize, "FIRST_ROWS", 2)
    changes = {("r00.00", position, attention(1, "query")): bump() for position in range(5)}
    result = compared(tmp_path, changes=changes)
    assert [row.position for row in result.first_rows] == [0, 1]
    assert next(site.rows_differ for site in result.sites if site.name == attention(1, "query")) == 5


def test_rows_of_which_only_digests_were_kept_are_not_told(tmp_path: Path) -> None:
    changes = {("r00.00", position, attention(1, "query")): bump() for position in range(5)}
    assert compared(tmp_path, changes=changes, payload=frozenset()).first_rows == []
