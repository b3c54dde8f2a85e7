"""The sentences about a segment and its row."""

from __future__ import annotations

import pytest
from findings import finding

from localizer.diff.result import (
    KeyValueRows,
    Logits,
    Reason,
    TopTwo,
    Unobserved,
)
from localizer.report import wording
from localizer.report.safe import clean
from localizer.wire.spec import HIDDEN, INPUT_IDS, LOGITS, TOKEN


def layer(number: int, kind: str) -> str:
    return f"model.layers.{number}.self_attn.attn/{kind}"


def test_between_two_layers() -> None:
    assert wording.blame(finding(layer(17, "output"), layer(18, "query"))) == (
        "The query of layer 18 differs, the attention output of layer 17 is equal: the code between "
        "the attention output of layer 17 and the query of layer 18: o_proj, the norms and the MLP of "
        "layer 17; or the qkv projection, q/k norm and rotary embedding of layer 18."
    )


@pytest.mark.parametrize(
    ("after", "before", "unobserved", "words"),
    [
        (
            INPUT_IDS,
            layer(0, "query"),
            {},
            ["the embedding; or the first norm, the qkv projection", "layer 0"],
        ),
        (INPUT_IDS, layer(2, "query"), {"layers": [0, 1]}, ["the embedding", "layers 0–1, of which no site"]),
        (layer(1, "output"), layer(5, "key"), {"layers": [2, 3, 4]}, ["MLP of layer 1", "layers 2–4"]),
        (layer(1, "output"), layer(3, "key"), {"layers": [2]}, ["layer 2, of which no site was compared"]),
        (layer(1, "output"), layer(9, "key"), {"layers": [2, 5]}, ["2 layers between 2 and 5"]),
        (layer(1, "output"), layer(2, "output"), {}, ["qkv projection", "or the attention of layer 2"]),
        (layer(1, "value"), layer(2, "query"), {}, ["the attention of layer 1; o_proj"]),
        (layer(31, "output"), HIDDEN, {}, ["MLP of layer 31; or the final norm"]),
        (
            layer(0, "output"),
            HIDDEN,
            {"later_layers": True},
            ["any layer after layer 0 that was not recorded"],
        ),
        (HIDDEN, LOGITS, {}, ["hidden states are equal", "lm_head"]),
        (layer(3, "output"), LOGITS, {}, ["the final norm; or lm_head"]),
        (LOGITS, TOKEN, {}, ["the logits are equal", "the sampler"]),
        (HIDDEN, TOKEN, {}, ["lm_head", "or the logits processors"]),
        (
            "model.layers.0.mlp/act",
            layer(1, "query"),
            {},
            ["code between model.layers.0.mlp/act and the query"],
        ),
        (None, layer(1, "query"), {}, ["nothing upstream of it was compared"]),
        (None, INPUT_IDS, {}, ["inputs of the forward pass differ already: the input ids"]),
    ],
)
def test_what_a_segment_holds(
    after: str | None, before: str, unobserved: dict[str, object], words: list[str]
) -> None:
    said = wording.blame(finding(after, before, unobserved=Unobserved(**unobserved)))
    assert [word for word in words if word not in said] == [], said
    assert said.endswith((".", "same."))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((9, 9, 0, 0), "Key and value rows as written are equal at all 9 earlier positions of that request."),
        ((9, 5, 0, 4), "equal at 5 of 9 earlier positions of that request; the other 4 were not compared."),
        ((9, 5, 3, 1), "Key or value rows as written differ at 3 of 9 earlier positions of that request."),
        ((9, 0, 0, 9), "Key and value rows of the 9 earlier positions of that request were not compared."),
        ((1, 1, 0, 0), "equal at all 1 earlier position of"),
        ((0, 0, 0, 0), "the KV contents it read."),
    ],
)
def test_what_is_known_of_the_keys_that_attention_read(rows: tuple[int, int, int, int], words: str) -> None:
    positions, equal, differ, unknown = rows
    counts = KeyValueRows(positions=positions, equal=equal, differ=differ, not_compared=unknown)
    said = wording.blame(finding(layer(3, "value"), layer(3, "output"), key_value=counts))
    assert "the attention kernel, its metadata or the KV contents it read." in said
    assert words in said


def test_an_attention_whose_own_key_was_not_compared() -> None:
    inside = Unobserved(sites=[layer(3, "key")])
    said = wording.blame(finding(layer(3, "query"), layer(3, "output"), unobserved=inside))
    assert f"the code that makes them lies inside too: {layer(3, 'key')}." in said


def test_elements() -> None:
    assert wording.elements(finding(layer(17, "output"), layer(18, "query"))) == (
        "3 of 576 elements differ (class 1-ulp; max ULP 1, max abs 0.00781, max rel 0.00781), the first at "
        "[2, 17]: candidate 1.0078125 (0x3f81), parent 1.0 (0x3f80)."
    )


def test_elements_without_payload() -> None:
    found = finding(None, HIDDEN, class_=None, elements_differ=None, values=None)
    assert wording.elements(found) == (
        "Only digests were kept of that row: capture with --payload all to see how much it differs."
    )
    assert "another dtype" in wording.elements(finding(None, HIDDEN, class_="dtype"))


def test_a_tie_explains_and_does_not_excuse() -> None:
    one = TopTwo(top1=3, top1_value=2.0, top2=4, top2_value=2.0, margin=0.0, tie=True)
    other = TopTwo(top1=4, top1_value=2.5, top2=3, top2_value=2.0, margin=0.5, tie=False)
    said = wording.logits(Logits(candidate=one, parent=other, argmax_flip=True))
    assert said == (
        "candidate 3 (2) before 4 (2), tied; parent 4 (2.5) before 3 (2), margin 0.5; the argmax flips. "
        "A tie explains a flip; it does not excuse the difference."
    )
    assert "tie explains" not in wording.logits(Logits(candidate=one, parent=one, argmax_flip=False))


def test_every_reason_has_a_sentence() -> None:
    from localizer.diff import verdict

    codes = [value for name, value in vars(verdict).items() if name.isupper() and isinstance(value, str)]
    codes = [code for code in codes if code not in ("identical", "diverged", "inconclusive")]
    assert len(codes) >= 7
    for code in codes:
        if code not in ("candidate", "parent"):
            said = wording.reason(Reason(code=code, source="candidate", detail="the disk was full.", count=3))
            assert said not in ("", code), code
            assert not said.endswith(".")


@pytest.mark.parametrize("text", ["\x1b[31m", "a\nb", "\x9b", "\u202e", "\u2028", "\x00", "\ud800", "\u200b"])
def test_unprintable_text_is_escaped(text: str) -> None:
    assert clean(text).isprintable()
    assert "\\" in clean(text)


def test_long_text_is_cut() -> None:
    assert clean("x" * 1000, 10) == "x" * 10 + "..."
    assert clean("naïve 日本") == "naïve 日本"
