"""An archive from a stranger does no harm: what localizer would not write itself is refused in a sentence."""

from __future__ import annotations

import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from altered import small
from builders import Plan, attention, bump, pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localizer.cli.main import main
from localizer.errors import DamagedCapture, LocalizerError, NotACapture
from localizer.run.attach import attach
from localizer.store import archive, names, pack
from localizer.store.archive import Archive
from localizer.store.reader import Capture
from localizer.store.verify import verify_archive

Added = list[tuple[zipfile.ZipInfo | str, bytes]]


def contents(root: Path) -> dict[str, bytes]:
    """The members of a sound archive of one small capture."""
    folder = small(root / "captures")
    return {
        f"candidate/{path.relative_to(folder)}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def info(name: str, mode: int = stat.S_IFREG | 0o644, **facts: int) -> zipfile.ZipInfo:
    found = zipfile.ZipInfo(name, pack.WHEN)
    found.create_system, found.external_attr = 3, mode << 16
    found.compress_type = zipfile.ZIP_DEFLATED
    for fact, value in facts.items():
        setattr(found, fact, value)
    return found


def zipped(path: Path, members: dict[str, bytes], more: Added | None = None) -> Path:
    """An archive as another tool might write it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, blob in members.items():
            file.writestr(info(name), blob)
        for what, blob in more or []:
            file.writestr(what, blob)
    return path


def patched(blob: bytes, name: str, offset: int, value: bytes) -> bytes:
    """An archive with other bytes in the directory entry of a member."""
    at = blob.rindex(b"PK\x01\x02", 0, blob.rindex(name.encode()))
    return blob[: at + offset] + value + blob[at + offset + len(value) :]


def refused(path: Path, why: str) -> None:
    """It is refused by whatever opens it, and nothing is left of it anywhere."""
    with pytest.raises(DamagedCapture, match=why) as caught:
        Archive(path).load(None)
    assert str(caught.value).isprintable()
    assert verify_archive(path).state == "damaged"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where archives are unpacked; what is left there at the end was left behind."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(archive.tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../x", "candidate/../../x", "candidate/../open.json", "/etc/passwd", "//x", "C:\\x", "C:/x", "c:x",
        "candidate\\open.json", "./x", ".hidden", "candidate//open.json", "candidate/", "candidate/rank-0/",
        "candidate/rank-00/rows-00000.safetensors", "candidate/rank-0/rows-00000.safetensors/x",
        "candidate/x.py", "candidate/rank-0/x.safetensors", "candidate/sub/open.json", "x/y/z/open.json",
        "a b", "caf\u00e9", "x" * 101, "con\nx", "\x1b[2J", "x\u202ey", "~", "-rf", "$HOME", "candidate",
    ],
)  # fmt: skip
def test_no_member_leaves_the_folder(tmp_path: Path, scratch: Path, name: str) -> None:
    path = zipped(tmp_path / "x.zip", contents(tmp_path), [(info(name), b"x")])
    refused(path, "no member may be called|is there twice")
    assert list(scratch.iterdir()) == []
    assert not (tmp_path.parent / "x").exists()


@pytest.mark.parametrize(
    "mode",
    [stat.S_IFLNK | 0o777, stat.S_IFDIR | 0o755, stat.S_IFIFO | 0o644, stat.S_IFCHR, stat.S_IFSOCK | 0o600,
     stat.S_IFBLK | 0o600, stat.S_IFREG | 0o755, stat.S_IFREG | 0o4644, stat.S_IFREG | 0o2644, 0o100],
)  # fmt: skip
def test_no_link_nothing_special_nothing_executable(tmp_path: Path, scratch: Path, mode: int) -> None:
    path = zipped(tmp_path / "x.zip", contents(tmp_path), [(info("notes.txt", mode), b"/etc/passwd")])
    refused(path, "is a link, a folder, executable or a special file")
    assert list(scratch.iterdir()) == []


def test_a_folder_of_another_system(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.zip", contents(tmp_path), [(info("notes.txt", external_attr=0x10), b"")])
    refused(path, "is a link, a folder, executable or a special file")


@pytest.mark.parametrize("name", ["notes.txt", "NOTES.TXT", "Candidate", "candidate/OPEN.json"])
def test_no_name_twice(tmp_path: Path, name: str) -> None:
    with (
        pytest.warns(UserWarning, match="Duplicate") if name == "notes.txt" else pytest.MonkeyPatch.context()
    ):
        path = zipped(tmp_path / "x.zip", contents(tmp_path), [(info("notes.txt"), b"1"), (info(name), b"2")])
    refused(path, "is there twice|no member may be called")


def test_a_bomb(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = contents(tmp_path)
    many = zipped(tmp_path / "many.zip", members, [(info(f"n{number}.txt"), b"") for number in range(10_001)])
    refused(many, "more than 10,000 members")
    monkeypatch.setattr(archive, "MOST_TOTAL", 1 << 20)
    monkeypatch.setattr(archive, "MOST_RATIO", 2)
    long = zipped(
        tmp_path / "long.zip", members, [(info(f"n{number}"), bytes(1 << 18)) for number in range(8)]
    )
    refused(long, "it would unpack to")
    monkeypatch.setattr(archive, "MOST_MEMBER", 1 << 17)
    refused(long, "would unpack to 262,144 bytes")
    assert list(scratch.iterdir()) == []


def test_sizes_that_lie(tmp_path: Path, scratch: Path) -> None:
    """A member that would unpack to more, or to less, than the directory says stops where it says."""
    members = contents(tmp_path)
    blob = zipped(tmp_path / "x.zip", members).read_bytes()
    path = tmp_path / "lie.zip"
    for size, why in (
        (10, "cannot be unpacked"),
        (1 << 31, "would unpack to"),
        (5_000, "does not have the size|cannot"),
    ):
        path.write_bytes(patched(blob, "candidate/open.json", 24, struct.pack("<I", size)))
        refused(path, why)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (8, b"\x01\x00", "encrypted or packed"),
        (8, b"\x20\x00", "encrypted or packed|cannot be read"),
        (10, b"\x0c\x00", "encrypted or packed"),
        (10, b"\x0e\x00", "encrypted or packed"),
        (10, b"\x00\x00", "has two sizes"),
        (16, b"\x00\x00\x00\x01", "cannot be unpacked"),
        (42, b"\x00\x00\x00\x00", "overlaps another member"),
        (42, b"\xff\xff\xff\x7f", "overlap its directory|cannot be read"),
        (20, b"\xff\xff\xff\x7f", "overlap"),
    ],
)
def test_directories_that_lie(tmp_path: Path, offset: int, value: bytes, why: str) -> None:
    blob = zipped(tmp_path / "x.zip", contents(tmp_path)).read_bytes()
    (tmp_path / "x.zip").write_bytes(patched(blob, "candidate/open.json", offset, value))
    refused(tmp_path / "x.zip", why)


@pytest.mark.parametrize(
    "change",
    [
        lambda blob: blob + b"#!/bin/sh",
        lambda blob: blob[:-2] + b"\x03\x00abc",
        lambda blob: blob[:4] + b"more" + blob[4:],
        lambda blob: blob[:-22],
        lambda blob: blob[: len(blob) // 2],
        lambda blob: blob[:-12] + b"\xff" * 10 + blob[-2:],
        lambda blob: blob[:-6] + b"\x00\x00\x00\x00" + blob[-2:],
    ],
)
def test_something_before_behind_or_missing(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = zipped(tmp_path / "x.zip", contents(tmp_path))
    path.write_bytes(change(path.read_bytes()))
    refused(path, "does not end as|before or behind|cannot be read|more than")


def test_what_is_no_archive(tmp_path: Path) -> None:
    for number, blob in enumerate((b"", b"PK", b"%PDF", b"#!/bin/sh" * 100)):
        path = tmp_path / str(number)
        path.write_bytes(blob)
        with pytest.raises(NotACapture, match="is not an archive of captures"):
            names.load(tmp_path, str(path))
    with pytest.raises(NotACapture, match="holds no captures"):
        verify_archive(_empty(tmp_path))


def _empty(tmp_path: Path) -> Path:
    pack.write(tmp_path / "empty.zip", {"README.txt": b""})
    return tmp_path / "empty.zip"


def test_an_archive_inside_is_data(tmp_path: Path, scratch: Path) -> None:
    inner = zipped(tmp_path / "inner.zip", contents(tmp_path)).read_bytes()
    path = zipped(tmp_path / "x.zip", {"inner.zip": inner} | contents(tmp_path / "b"))
    capture = Archive(path).load(None)
    assert not list(scratch.rglob("inner.zip"))
    assert capture.label == "candidate/0001"


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_altered_archive_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Some bytes are others: whatever comes out is a capture, or one sentence."""
    root = tmp_path_factory.getbasetemp() / "altered"
    if not root.exists():
        root.mkdir()
        pack.write(root / "sound.zip", contents(root))
    blob = bytearray((root / "sound.zip").read_bytes())
    start = struct.unpack_from("<I", blob, len(blob) - 6)[0]
    for _ in range(data.draw(st.integers(1, 4))):
        low = data.draw(st.sampled_from([0, start, start, len(blob) - 22]))
        blob[data.draw(st.integers(low, len(blob) - 1))] = data.draw(st.integers(0, 255))
    (root / "x.zip").write_bytes(blob)
    try:
        found = verify_archive(root / "x.zip")
        sentences = [*found.reasons, *(why for it in found.captures.values() for why in it.reasons)]
        Archive(root / "x.zip").load(None).check()
    except LocalizerError as error:
        sentences = [str(error)]
    for sentence in sentences:
        assert sentence.isprintable()
        assert len(sentence) < 1000


# -- reading ----------------------------------------------------------------------------------------------


def localize(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["localize", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive x.zip of two captures, in the current folder, without the captures."""
    changed = {("r01.00", 4, attention(1, "query")): bump()}
    folders = pair(tmp_path / "there", Plan(), changes=changed)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    attach(*map(Capture, folders), [], Path("x.zip"), limit=10**7, redact=True)
    return Path("x.zip")


def test_every_command_takes_a_capture_in_an_archive(
    made: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, *arguments in (
        (0, "verify", "x.zip"), (0, "verify", "x.zip:parent"), (0, "show", "x.zip:candidate"),
        (0, "show", "x.zip:candidate", "--format", "json"), (1, "diff", "x.zip:candidate", "x.zip:parent"),
        (0, "diff", "--within", "x.zip:parent"), (2, "show", "x.zip"), (2, "show", "x.zip:nothing"),
        (2, "show", "y.zip:parent"),
    ):  # fmt: skip
        found, out, err = localize(monkeypatch, capsys, *arguments)
        assert found == code, (arguments, out, err)
        assert str(scratch) not in out + err
    assert list(scratch.iterdir()) == []
    assert localize(monkeypatch, capsys, "show", "x.zip")[2] == (
        "localize: x.zip holds several captures; name one: x.zip:candidate, x.zip:parent.\n"
    )
    out = localize(monkeypatch, capsys, "diff", "x.zip:candidate", "x.zip:parent")[1]
    assert "x.zip:candidate" in out
    out = localize(monkeypatch, capsys, "show", "x.zip:candidate")[1]
    assert "reduced       from candidate/0001" in out


def test_verify_looks_at_the_archive_and_at_every_capture(
    made: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(made) as file:
        members = {name: file.read(name) for name in file.namelist() if name != pack.CHECKSUMS}
    altered = members | {"README.txt": b"Verdict: identical."}
    zipped(Path("readme.zip"), altered, [(info(pack.CHECKSUMS), _checksums(members))])
    zipped(Path("less.zip"), members, [(info(pack.CHECKSUMS), _checksums({"README.txt": b""}))])
    zipped(Path("none.zip"), members)
    rows = "parent/rank-0/rows-00000.safetensors"
    pack.write(Path("row.zip"), members | {rows: members[rows][:-1] + b"\x01"})
    pack.write(
        Path("killed.zip"), {name: blob for name, blob in members.items() if name != "parent/manifest.json"}
    )
    for name, code, text in (
        (
            "readme.zip",
            1,
            "damaged: readme.zip is damaged or hostile: README.txt does not have its checksums",
        ),
        ("less.zip", 1, "checksums.txt is not of its members"),
        ("none.zip", 1, "it has no checksums.txt"),
        ("row.zip", 1, "row.zip:parent/rank-0/rows-00000.safetensors does not have the digest"),
        ("killed.zip", 3, "sound but incomplete: killed.zip:parent"),
        ("x.zip", 0, "x.zip: 16 members have their checksums."),
    ):
        found, out, err = localize(monkeypatch, capsys, "verify", name)
        assert (found, err) == (code, ""), out
        assert text in out
    assert list(scratch.iterdir()) == []


def _checksums(members: dict[str, bytes]) -> bytes:
    return "".join(line for name, blob in members.items() for line in pack.checksums(name, blob)).encode()


def test_sha256sum_checks_it_as_well(made: Path) -> None:
    with zipfile.ZipFile(made) as file:
        file.extractall("out")
    done = subprocess.run(
        ["sha256sum", "-c", "checksums.txt"], cwd="out", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.count(": OK") == 16


def test_the_folder_it_was_unpacked_to_is_private_and_goes(made: Path, scratch: Path) -> None:
    capture = names.load(Path("captures"), "x.zip:candidate")
    (folder,) = scratch.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}
    del capture
    assert list(scratch.iterdir()) == []


def test_attach_says_what_it_made(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (
        small(Path("captures")),
        small(Path("captures"), name="parent"),
        small(Path("captures"), name="parent", number=2),
    )
    code, out, err = localize(
        monkeypatch, capsys, "attach", "candidate", "parent/0001", "--control", "parent", "--limit", "200KB"
    )
    assert (code, err) == (0, "")
    assert out.startswith("candidate-parent.zip: ")
    assert "SHA-256" in out.splitlines()[0]
    assert "  left out: prompts" in out
    assert Archive(Path("candidate-parent.zip")).captures == ["candidate", "parent", "control-1"]
    code, out, _ = localize(
        monkeypatch, capsys, "attach", "candidate", "parent", "--no-redact", "-o", "y.zip"
    )
    assert (code, [line.split(": ")[0] for line in out.splitlines()[:2]]) == (0, ["y.zip", "y.md"])
    assert "left out" not in out
    for size in ("25", "1TB", "-1MB", "x"):
        assert localize(monkeypatch, capsys, "attach", "candidate", "parent", "--limit", size)[0] == 2
