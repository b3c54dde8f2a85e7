"""An overlay's files stand in for installed ones, and everything else stays the installed package's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import xxhash

from localizer.errors import LocalizerError
from localizer.sources.overlay import lay as hold
from localizer.sources.overlay import stand_ins

INSTALLED = {
    "__init__.py": "from ._version import version\n",
    "_version.py": "version = '1'\n",
    "_C.abi3.so": "native",
    "v1/__init__.py": "",
    "v1/core.py": "core\n",
    "v1/worker/runner.py": "runner\n",
    "model/llama.py": "llama\n",
}


def lay(overlay: Path, installed: Path) -> tuple[Path, dict[str, str]]:
    """Lay out an overlay and hold it no longer."""
    laid = hold(overlay, installed)
    laid.lock.close()
    return laid.tree, laid.files


def plant(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    return plant(tmp_path / "site-packages" / "vllm", INSTALLED)


def checkout(tmp_path: Path, files: dict[str, str]) -> Path:
    plant(tmp_path / "checkout" / "vllm", files)
    return tmp_path / "checkout"


def seen(tree: Path) -> dict[str, str]:
    """All files of the tree as the interpreter sees them."""
    found: dict[str, str] = {}

    def look(folder: Path, prefix: str) -> None:
        for path in folder.iterdir():
            if path.is_dir():
                look(path, f"{prefix}{path.name}/")
            else:
                found[prefix + path.name] = path.read_text()

    look(tree / "vllm", "")
    return found


def test_changed_and_new_files_stand_in(tmp_path: Path, installed: Path) -> None:
    files = {
        "v1/core.py": "changed\n",
        "v1/new/deep.py": "new\n",
        "model/llama.py": INSTALLED["model/llama.py"],
    }
    tree, replaced = lay(checkout(tmp_path, files), installed)
    assert seen(tree) == INSTALLED | {"v1/core.py": "changed\n", "v1/new/deep.py": "new\n"}
    assert replaced == {
        name: xxhash.xxh3_128_hexdigest(files[name].encode()) for name in ("v1/core.py", "v1/new/deep.py")
    }
    assert (tree / "vllm" / "model").is_symlink()
    assert not (tree / "vllm" / "v1" / "core.py").is_symlink()
    assert seen(installed.parent) == INSTALLED


def test_built_and_hidden_files_never_stand_in(tmp_path: Path, installed: Path) -> None:
    odd = {
        "_version.py": "version = '2'\n",
        "commit_id.py": "x",
        "_C.abi3.so": "other",
        "v1/__pycache__/core.cpython-311.pyc": "x",
        "v1/core.pyc": "x",
        ".git/config": "x",
        "v1/.core.py.swp": "x",
    }
    overlay = checkout(tmp_path, odd)
    assert list(stand_ins(overlay / "vllm")) == []
    with pytest.raises(LocalizerError, match="nothing would change"):
        lay(overlay, installed)


def test_an_overlay_without_vllm_is_refused(tmp_path: Path, installed: Path) -> None:
    (tmp_path / "vllm.py").write_text("")
    with pytest.raises(LocalizerError, match=r"has no vllm/ folder; name the folder that contains vllm/"):
        lay(tmp_path, installed)


def test_the_tree_follows_the_overlay(tmp_path: Path, installed: Path) -> None:
    """One overlay keeps one tree, whatever is edited, added or taken back in between."""
    overlay = checkout(tmp_path, {"v1/core.py": "1", "v1/worker/runner.py": "2", "extra/a.py": "3"})
    tree, _ = lay(overlay, installed)
    again, _ = lay(plant(overlay / "vllm", {"v1/core.py": "edited"}).parent, installed)
    assert again == tree
    assert seen(tree) == INSTALLED | {"v1/core.py": "edited", "v1/worker/runner.py": "2", "extra/a.py": "3"}
    shutil.rmtree(overlay / "vllm" / "extra")
    (overlay / "vllm" / "v1" / "worker" / "runner.py").unlink()
    assert list(lay(overlay, installed)[1]) == ["v1/core.py"]
    assert seen(tree) == INSTALLED | {"v1/core.py": "edited"}


def test_a_file_may_become_a_folder_and_back(tmp_path: Path, installed: Path) -> None:
    overlay = checkout(tmp_path, {"data": "file", "v1/core.py": "1"})
    tree, _ = lay(overlay, installed)
    (overlay / "vllm" / "data").unlink()
    plant(overlay / "vllm", {"data/a.py": "folder"})
    lay(overlay, installed)
    assert seen(tree)["data/a.py"] == "folder"
    shutil.rmtree(overlay / "vllm" / "data")
    plant(overlay / "vllm", {"data": "file again"})
    lay(overlay, installed)
    assert seen(tree)["data"] == "file again"


def test_files_that_the_package_lost_are_lost(tmp_path: Path, installed: Path) -> None:
    tree, _ = lay(checkout(tmp_path, {"v1/core.py": "1"}), installed)
    (installed / "model" / "llama.py").unlink()
    (installed / "v1" / "worker" / "runner.py").unlink()
    shutil.rmtree(installed / "v1" / "worker")
    lay(tmp_path / "checkout", installed)
    assert set(seen(tree)) == set(INSTALLED) - {"model/llama.py", "v1/worker/runner.py"}


def test_two_overlays_have_two_trees(tmp_path: Path, installed: Path) -> None:
    one = lay(checkout(tmp_path / "one", {"v1/core.py": "1"}), installed)[0]
    two = lay(checkout(tmp_path / "two", {"v1/core.py": "2"}), installed)[0]
    assert (seen(one)["v1/core.py"], seen(two)["v1/core.py"]) == ("1", "2")


def test_a_tree_that_is_in_use_stays_as_it_is(tmp_path: Path, installed: Path) -> None:
    overlay = checkout(tmp_path, {"v1/core.py": "1"})
    held = hold(overlay, installed)
    again = hold(overlay, installed)
    assert (again.tree, again.files) == (held.tree, held.files)
    again.lock.close()
    plant(overlay / "vllm", {"v1/core.py": "2"})
    with pytest.raises(LocalizerError, match="has changed while a capture runs from it"):
        hold(overlay, installed)
    assert seen(held.tree)["v1/core.py"] == "1"
    held.lock.close()
    assert seen(lay(overlay, installed)[0])["v1/core.py"] == "2"


def test_a_linked_folder_is_refused(tmp_path: Path, installed: Path) -> None:
    overlay = checkout(tmp_path, {"v1/core.py": "1"})
    (overlay / "vllm" / "linked").symlink_to(tmp_path)
    with pytest.raises(LocalizerError, match="is a linked folder"):
        hold(overlay, installed)
