"""Tolerances: how they are written, what passes, and that they change nothing else."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
import slow_numbers as slow
from builders import Plan, attention, bump, pair, put
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.diff import diff, localize
from localizer.diff.numerics import describe
from localizer.diff.result import Criterion, Result
from localizer.diff.tolerance import criteria_of, parse
from localizer.store.dtypes import NUMPY
from localizer.store.reader import Capture

QUERY = attention(1, "query")
ONE_ULP = [parse("*=ulp:1")]


def criteria(text: str) -> list[Criterion]:
    return parse(f"*={text}").criteria


def passes(one: np.ndarray, other: np.ndarray, text: str) -> bool | None:
    detail = describe(one, other, criteria(text))
    assert detail is not None
    return detail.within_tolerance


def bits(dtype: str, *words: int) -> np.ndarray:
    return np.array(words, np.dtype(f"u{NUMPY[dtype].itemsize}")).view(NUMPY[dtype])


# -- how they are written ---------------------------------------------------------------------------------


def test_a_tolerance_has_a_pattern_and_criteria() -> None:
    given = parse("model.layers.*/query=ulp:1|abs:1e-3|rel:.01")
    assert given.site == "model.layers.*/query"
    assert [(one.kind, one.limit) for one in given.criteria] == [("ulp", 1), ("abs", 1e-3), ("rel", 1e-2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no site"),
        ("ulp:1", "names no site"),
        ("=ulp:1", "names no site"),
        ("x=", "'' is no criterion"),
        ("x=ulp", "'' in 'ulp' is no number"),
        ("x=ulp:1|", "'' is no criterion"),
        ("x=ulps:1", "'ulps:1' is no criterion"),
        ("x=abs:one", "'one' in 'abs:one' is no number"),
        ("x=abs:nan", "finite number that is not negative"),
        ("x=rel:inf", "finite number that is not negative"),
        ("x=abs:-1", "finite number that is not negative"),
        ("x=ulp:1.5", "a whole number"),
        ("x=ulp:1e30", "a whole number"),
    ],
)
def test_what_cannot_be_a_tolerance(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(text)


def test_every_tolerance_for_a_site_counts() -> None:
    given = [parse("*/query=ulp:1"), parse("lm_head/logits=abs:1"), parse("*layers.1.*=rel:0.5")]
    assert [one.kind for one in criteria_of(QUERY, given)] == ["ulp", "rel"]
    assert [one.kind for one in criteria_of("lm_head/logits", given)] == ["abs"]
    assert criteria_of("sampler/token", given) == []
    assert criteria_of(QUERY.upper(), given) == []


# -- what passes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "text", "verdict"),
    [
        ([1.0, 2.25], [1.0, 2.0], "abs:0.25", True),
        ([1.0, 2.25], [1.0, 2.0], "abs:0.24", False),
        ([1.0, 2.25], [1.0, 2.0], "rel:0.125", True),
        ([2.0], [2.25], "rel:0.112", True),
        ([2.0], [2.25], "rel:0.111", False),
        ([-0.0], [0.0], "ulp:0", True),
        ([-0.0], [0.0], "rel:0", True),
        ([1e-9], [0.0], "rel:1e9", False),
        ([1e300], [-1e300], "abs:1e308", True),
        ([1.7e308], [-1.7e308], "abs:1.7e308", False),
        ([5e-324], [-5e-324], "ulp:2", True),
        ([5e-324], [-5e-324], "ulp:1", False),
    ],
)
def test_each_criterion(one: list[float], other: list[float], text: str, verdict: bool) -> None:
    assert passes(np.array(one), np.array(other), text) is verdict


def test_an_element_needs_one_criterion_and_a_row_all_its_elements() -> None:
    parent = np.array([1000.0, 0.001], np.float32)
    candidate = np.array([1001.0, 0.002], np.float32)
    assert passes(candidate, parent, "rel:0.01") is False
    assert passes(candidate, parent, "abs:0.01") is False
    assert passes(candidate, parent, "abs:0.01|rel:0.01") is True


EVERYTHING = f"ulp:{1 << 63}|abs:1e308|rel:1e308"


@pytest.mark.parametrize("dtype", [*slow.FORMATS])
def test_nothing_that_is_not_finite_ever_passes(dtype: str) -> None:
    kind = NUMPY[dtype]
    row = [(np.nan, 1.0), (1.0, np.nan)]
    row += [] if dtype == "float8_e4m3fn" else [(np.inf, 1.0), (1.0, -np.inf), (np.inf, -np.inf)]
    for one, other in row:
        assert passes(np.array([one], kind), np.array([other], kind), EVERYTHING) is False
    first, second = {"float8_e4m3fn": (0x7F, 0xFF), "float8_e5m2": (0x7D, 0x7E)}.get(
        dtype, (int(bits_of(kind)), int(bits_of(kind)) | 1)
    )
    assert passes(bits(dtype, first), bits(dtype, second), EVERYTHING) is False


def bits_of(kind: np.dtype) -> int:
    return int(np.array([np.nan], kind).view(np.dtype(f"u{kind.itemsize}"))[0])


def test_a_nan_of_equal_bytes_fails_the_row_and_an_infinity_does_not() -> None:
    one, other = np.array([np.nan, 1.0]), np.array([np.nan, 1.5])
    assert passes(one, other, "abs:1") is False
    assert passes(np.array([-np.inf, 1.0]), np.array([-np.inf, 1.5]), "abs:1") is True


@pytest.mark.parametrize("dtype", slow.INTEGERS)
def test_integers_have_no_units(dtype: str) -> None:
    one, other = bits(dtype, 1), bits(dtype, 0)
    assert passes(one, other, "ulp:100") is False
    assert passes(one, other, "abs:1") is True
    assert passes(one, other, "abs:0.9") is False
    assert passes(other, one, "rel:1") is True


def test_great_integers_are_judged_exactly() -> None:
    assert passes(np.array([2**53 + 1]), np.array([0]), f"abs:{2**53}") is False
    assert passes(np.array([2**63 - 1]), np.array([-(2**63)]), "abs:1e30") is True


def test_other_dtypes_and_shapes_never_pass() -> None:
    one = np.zeros((2, 3), np.float32)
    assert passes(one, one.astype(np.float16), EVERYTHING) is False
    assert passes(one, one.reshape(3, 2), EVERYTHING) is False


def test_without_a_tolerance_nothing_is_judged() -> None:
    detail = describe(np.zeros(2), np.ones(2))
    assert detail is not None
    assert detail.within_tolerance is None


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*slow.FORMATS, "int8", "uint64"]),
    st.sampled_from(["ulp", "abs", "rel"]),
    st.sampled_from([0, 1, 2, 16, 1000]),
    st.data(),
)
def test_it_is_what_exact_numbers_say(dtype: str, kind: str, limit: int, data: st.DataObject) -> None:
    top = 1 << slow.width(dtype)
    one = data.draw(st.integers(0, top - 1))
    other = data.draw(
        st.one_of(st.integers(0, top - 1), st.integers(-20, 20).map(lambda gap: (one + gap) % top))
    )
    if one == other:
        return
    left, right = slow.decode(dtype, one), slow.decode(dtype, other)
    if not isinstance(left, Fraction) or not isinstance(right, Fraction):
        expected = False
    elif kind == "ulp":
        expected = dtype in slow.FORMATS and slow.steps(dtype, one, other) <= limit
    else:
        bound = Fraction(limit) * (abs(right) if kind == "rel" else 1)
        gap = abs(left - right)
        if abs(gap - bound) < bound * Fraction(1, 1 << 48):
            return  # on the edge: computed in float64
        expected = gap <= bound
    assert passes(bits(dtype, one), bits(dtype, other), f"{kind}:{limit}") is expected


# -- in a result ------------------------------------------------------------------------------------------


def compared(root: Path, tolerances: list[str], **candidate: object) -> Result:
    one, other = pair(root, Plan(), **candidate)
    return diff(Capture(one), Capture(other), tolerances=[parse(text) for text in tolerances])


CHANGES = {("r00.00", 3, QUERY): bump(), ("r01.00", 4, QUERY): bump((0, 1), 3)}


def test_a_tolerance_marks_and_changes_nothing_else(tmp_path: Path) -> None:
    without = compared(tmp_path / "without", [], changes=CHANGES)
    one, other = tmp_path / "without" / "candidate" / "0001", tmp_path / "without" / "parent" / "0001"
    marked = diff(Capture(one), Capture(other), tolerances=ONE_ULP)
    assert (marked.verdict, without.verdict) == ("diverged", "diverged")

    def bare(result: Result) -> Result:
        unmarked = {"within_tolerance": None}
        sites = [
            msgspec.structs.replace(site, **unmarked, rows_within_tolerance=None) for site in result.sites
        ]
        requests = [
            msgspec.structs.replace(item, first=msgspec.structs.replace(item.first, **unmarked))
            for item in result.requests
        ]
        assert result.first is not None
        assert result.summary is not None
        return msgspec.structs.replace(
            result,
            tolerances=[],
            summary=msgspec.structs.replace(result.summary, **unmarked),
            first=msgspec.structs.replace(result.first, **unmarked),
            first_rows=[msgspec.structs.replace(row, **unmarked) for row in result.first_rows],
            requests=requests,
            sites=sites,
        )

    assert bare(marked) == without == bare(without)


def test_findings_requests_rows_and_sites_are_marked(tmp_path: Path) -> None:
    result = compared(tmp_path, ["*/query=ulp:1"], changes=CHANGES)
    assert result.first is not None
    assert result.summary is not None
    assert (result.first.within_tolerance, result.summary.within_tolerance) == (True, True)
    assert [item.first.within_tolerance for item in result.requests] == [True, False]
    assert [row.within_tolerance for row in result.first_rows] == [True, False]
    site = next(item for item in result.sites if item.name == QUERY)
    assert (site.rows_read, site.rows_within_tolerance, site.within_tolerance) == (2, 1, False)
    other = next(item for item in result.sites if item.name == attention(1, "key"))
    assert (other.rows_within_tolerance, other.within_tolerance) == (None, None)


def test_a_site_is_within_if_every_row_is(tmp_path: Path) -> None:
    result = compared(tmp_path, ["*/query=ulp:1", "*/query=abs:0.1"], changes=CHANGES)
    site = next(item for item in result.sites if item.name == QUERY)
    assert (site.rows_within_tolerance, site.within_tolerance) == (2, True)


def test_rows_that_were_not_read_leave_a_site_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localize, "JUDGED_ROWS", 1)
    result = compared(tmp_path, ["*/query=ulp:1"], changes=CHANGES)
    site = next(item for item in result.sites if item.name == QUERY)
    assert (site.rows_read, site.rows_within_tolerance, site.within_tolerance) == (1, 1, None)


def test_digests_alone_cannot_be_judged(tmp_path: Path) -> None:
    result = compared(tmp_path, ["*=ulp:1"], changes=CHANGES, payload=frozenset())
    assert result.first is not None
    assert result.first.within_tolerance is None
    site = next(item for item in result.sites if item.name == QUERY)
    assert (site.rows_read, site.rows_within_tolerance, site.within_tolerance) == (0, 0, None)


def test_another_dtype_is_judged_without_payload(tmp_path: Path) -> None:
    layouts = {QUERY: ("float32", (3, 4))}
    result = compared(tmp_path, ["*=ulp:9"], layouts=layouts, payload=frozenset())
    assert result.first is not None
    assert (result.first.class_, result.first.within_tolerance) == ("dtype", False)


def test_a_nan_is_beyond_any_tolerance(tmp_path: Path) -> None:
    result = compared(tmp_path, [f"*={EVERYTHING}"], changes={("r00.00", 3, QUERY): put(float("nan"))})
    assert result.first is not None
    assert (result.first.class_, result.first.within_tolerance) == ("non-finite", False)
