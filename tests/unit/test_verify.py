"""`verify` tells sound, incomplete and damaged apart, and does not believe a capture's own claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import DIGESTS, PAYLOAD, ROWS, column, edit, forge, small
from builders import Plan, attention, write

from localizer.errors import NotACapture
from localizer.store.digest import row_digest
from localizer.store.reader import Capture
from localizer.store.schema import LOG
from localizer.store.tensors import TensorFile
from localizer.store.verify import EXIT_CODES, verify
from localizer.wire.rowsum import ROWSUM

QUERY = attention(0, "query")


def test_sound_and_complete(tmp_path: Path) -> None:
    folder = small(tmp_path)
    result = verify(folder)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert (result.state, result.reasons, result.rows) == ("sound", [], 9)
    assert (result.files, result.size) == (len(files), sum(path.stat().st_size for path in files))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(payload=frozenset()),
        Plan(payload=frozenset({QUERY}), hashed=True, speculate=2),
        Plan(layers=(5, 7), payload=frozenset({attention(5, "query")})),
        Plan(only_tokens=True),
        Plan(chunk=1, repeats=2),
        Plan(dtype="float8_e4m3fn"),
        Plan(max_tokens=1, matrix=(1,)),
    ],
)
def test_every_capture_that_is_written_is_sound(tmp_path: Path, plan: Plan) -> None:
    assert verify(write(tmp_path, plan)).state == "sound"


def test_incomplete_is_not_damaged(tmp_path: Path) -> None:
    folder = small(tmp_path, manifest=False)
    result = verify(folder)
    assert (result.state, result.files, result.rows) == ("incomplete", 3, 9)
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write('{"name": "rank-0/rows-00')  # torn by a kill
    (folder / "rank-0" / ".rows-00001.safetensors.tmp").write_bytes(b"half")
    (folder / "rank-0" / "rows-00001.safetensors").write_bytes(b"not journalled")
    assert verify(folder) == result


def test_a_manifest_that_says_incomplete(tmp_path: Path) -> None:
    result = verify(small(tmp_path, state="incomplete", reasons=("rows are missing",)))
    assert (result.state, result.reasons) == ("incomplete", ["rows are missing"])


def test_exit_codes() -> None:
    assert EXIT_CODES == {"sound": 0, "damaged": 1, "incomplete": 3}


def test_no_capture(tmp_path: Path) -> None:
    with pytest.raises(NotACapture):
        verify(tmp_path)


def damaged(folder: Path) -> str:
    result = verify(folder)
    assert (result.state, result.files, len(result.reasons)) == ("damaged", 0, 1)
    return result.reasons[0]


def test_a_log_that_was_altered_is_damage(tmp_path: Path) -> None:
    folder = small(tmp_path)
    (folder / LOG).write_text("another log\n")
    assert LOG in damaged(folder)


def test_missing_rows_in_a_capture_that_says_complete(tmp_path: Path) -> None:
    folder = small(tmp_path, absent=frozenset({("r00.00", 0, QUERY)}))
    assert f"holds 8 of 9 rows of {QUERY}" in damaged(folder)


@pytest.mark.parametrize("claim", [(10, 10), (9, 8), (8, 9)])
def test_coverage_that_is_not_that_of_the_rows(tmp_path: Path, claim: tuple[int, int]) -> None:
    folder = small(tmp_path)

    def change(manifest: dict[str, Any]) -> None:
        manifest["coverage"][QUERY] = dict(zip(("expected", "recorded"), claim, strict=True))

    edit(folder, "manifest.json", change)
    assert "holds 9 of 9 rows" in damaged(folder)


def test_rows_that_feed_logits_without_logits(tmp_path: Path) -> None:
    folder = small(tmp_path)
    forge(folder, ROWS, arrays={"logits": np.full_like(column(folder, ROWS, "logits"), 1)})
    assert "it is said to be complete" in damaged(folder)


def test_payload_that_is_not_what_was_hashed(tmp_path: Path) -> None:
    folder = small(tmp_path)
    array = column(folder, PAYLOAD, QUERY)
    array[3] += 1
    forge(folder, PAYLOAD, arrays={QUERY: array})
    assert f"row 3 of {QUERY} does not have its digest" in damaged(folder)


def test_stored_rows_are_held_against_the_digest_of_their_site(tmp_path: Path) -> None:
    """Whoever keeps rows whose digests a GPU took: they are checked by that algorithm, and by no other."""
    folder = small(tmp_path)
    facts = json.loads(TensorFile(folder / DIGESTS).metadata)
    index = [site["name"] for site in facts["sites"]].index(QUERY)
    facts["algorithm"], facts["sites"][index]["digest"] = "by-site", ROWSUM

    def name_it(manifest: dict[str, Any]) -> None:
        next(site for site in manifest["sites"] if site["name"] == QUERY)["digest"] = ROWSUM

    edit(folder, "manifest.json", name_it)
    forge(folder, DIGESTS, metadata=json.dumps(facts))
    assert verify(folder).state == "damaged", "the digests are still the usual ones"
    digest, rows = column(folder, DIGESTS, "digest"), column(folder, PAYLOAD, QUERY)
    for row, stored in zip(column(folder, PAYLOAD, f"{QUERY}#rows"), rows, strict=True):
        digest[row, index] = np.frombuffer(row_digest(ROWSUM, stored.tobytes()), np.uint8)
    forge(folder, DIGESTS, arrays={"digest": digest})
    assert verify(folder).state == "sound"
    assert Capture(folder).row_payload(QUERY, 3) is not None
    digest[3, index, 0] ^= 1
    forge(folder, DIGESTS, arrays={"digest": digest})
    assert verify(folder).reasons == [
        f"{folder / PAYLOAD} is damaged: row 3 of {QUERY} does not have its digest; "
        "fetch or make the capture again."
    ]
