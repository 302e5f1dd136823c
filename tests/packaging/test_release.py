"""Releasing a package: what is written, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import release
from tools.public_interface import compare, exported_names, interface
from tools.release import RefusedError, Workspace, bounds, check_interface, date_changelog, next_version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = """[project]
name = "{name}"
version = "{version}"
dependencies = [{needs}]

[build-system]
requires = ["uv_build"]
"""
INIT = """from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"accel_low.words": "say loud=shout"})
"""


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Two packages, the lower of which was released as 0.1.0."""
    write(tmp_path, "pyproject.toml", '[tool.release]\nrepository = "https://example.org/it/"\n')
    write(tmp_path, "uv.lock", '[[package]]\nname = "accel-low"\nversion = "0.1.0"\n')
    low, high = "packages/accel-low", "packages/accel-high"
    write(tmp_path, f"{low}/pyproject.toml", PROJECT.format(name="accel-low", version="0.1.0", needs='"torch>=2.9"'))
    write(tmp_path, f"{low}/CHANGELOG.md", "# Changelog\n\n## Unreleased\n\n- Words.\n")
    write(tmp_path, f"{low}/src/accel_low/__init__.py", INIT)
    write(
        tmp_path, f"{low}/src/accel_low/words.py", "def say(text, times=1): ...\ndef shout(): ...\ndef hidden(): ...\n"
    )
    needs = '"accel-low>=0.1.0,<0.2", "accel-low[extra]>=0.1.0,<0.2"'
    write(tmp_path, f"{high}/pyproject.toml", PROJECT.format(name="accel-high", version="1.4.2", needs=needs))
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"], ["tag", "accel-low-v0.1.0"]):
        who = ["-c", "user.name=somebody", "-c", "user.email=nobody@example.org"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True)
    return Workspace(tmp_path)


@pytest.mark.parametrize(
    ("current", "step", "wanted"),
    [
        ("0.1.0", "first", "0.1.0"),
        ("0.1.0", "patch", "0.1.1"),
        ("0.1.3", "minor", "0.2.0"),
        ("1.16.2", "major", "2.0.0"),
    ],
)
def test_steps(current: str, step: str, wanted: str) -> None:
    assert next_version(current, step) == wanted


def test_siblings_stay_below_the_next_version_that_may_break_them() -> None:
    assert bounds("0.2.1") == ">=0.2.1,<0.3"
    assert bounds("1.16.0") == ">=1.16.0,<2"


def test_what_is_unreleased_gets_a_date() -> None:
    text = "# C\n\n## Unreleased\n\n- b\n\n## 0.1.0 - 2026-01-01\n\n- a\n"
    changed, notes = date_changelog(text, "0.2.0", "2026-02-02")
    assert changed == ("# C\n\n## Unreleased\n\n## 0.2.0 - 2026-02-02\n\n- b\n\n## 0.1.0 - 2026-01-01\n\n- a\n")
    assert notes == "- b"
    with pytest.raises(RefusedError, match="nothing under '## Unreleased'"):
        date_changelog(changed, "0.3.0", "2026-03-03")


def test_a_release_writes_version_addresses_and_bounds(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Workspace.run
    asked: list[tuple[str, ...]] = []

    def without_uv(self: Workspace, *command: str, **environment: str) -> str:
        asked.append(command)
        return "" if command[0] == "uv" else run(self, *command, **environment)

    monkeypatch.setattr(Workspace, "run", without_uv)  # this workspace has no lock that uv would know
    assert release.edit(workspace, "accel-low", "0.2.0", grew=True) == "- Words."
    assert ("uv", "lock", "-q", "--check") in asked
    low = workspace.project("accel-low")
    assert low["version"] == "0.2.0"
    assert low["urls"]["Changelog"] == "https://example.org/it/blob/HEAD/packages/accel-low/CHANGELOG.md"
    assert workspace.project("accel-high")["dependencies"] == [
        "accel-low>=0.2.0,<0.3",
        "accel-low[extra]>=0.2.0,<0.3",
    ]
    assert 'version = "0.2.0"' in (workspace.root / "uv.lock").read_text()


def test_the_last_release_is_known_in_a_clone_without_tags(workspace: Workspace, tmp_path: Path) -> None:
    assert workspace.last_release("accel-low") == "accel-low-v0.1.0"
    assert workspace.last_release("accel-high") is None
    write(workspace.root, "packages/accel-high/CHANGELOG.md", "# Changelog\n")
    workspace.run("git", "add", "-A")
    who = ["-c", "user.name=somebody", "-c", "user.email=nobody@example.org"]
    workspace.run("git", *who, "commit", "-qm", "Release accel-high 1.4.2")
    made = workspace.run("git", "rev-parse", "HEAD").strip()
    workspace.run("git", *who, "commit", "--allow-empty", "-qm", "Release accel-highest 2.0.0")
    copy = tmp_path / "copy"
    workspace.run("git", "clone", "-q", "--no-tags", str(workspace.root), str(copy))
    assert Workspace(copy).last_release("accel-high") == made
    assert Workspace(copy).last_release("accel-low") is None


def test_bounds_that_admit_a_version_stay_unless_the_interface_grew(workspace: Workspace) -> None:
    assert release.raise_bounds(workspace, "accel-low", "0.1.1", always=False) == []
    assert release.raise_bounds(workspace, "accel-low", "0.1.1", always=True) == ["accel-high"]
    assert workspace.project("accel-high")["dependencies"][0] == "accel-low>=0.1.1,<0.2"


@pytest.mark.parametrize(
    ("words", "breaks", "grew"),
    [
        ("def say(text, times=1): ...\ndef shout(): ...\n", "", False),
        ("def say(text, times=1, *, end=''): ...\ndef shout(): ...\n", "", False),
        ("def say(text, times): ...\ndef shout(): ...\n", "say", False),
        ("def say(text): ...\ndef shout(): ...\n", "times", False),
        ("def say(text, times=1): ...\ndef shout(loudness): ...\n", "loud", False),
    ],
    ids=["a hidden name", "an option more", "a default gone", "a parameter gone", "a renamed export"],
)
def test_breaking_changes_need_a_step_that_may_break(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory, words: str, breaks: str, grew: bool
) -> None:
    write(workspace.root, "packages/accel-low/src/accel_low/words.py", words)
    folder = tmp_path_factory.mktemp("release")
    if not breaks:
        assert check_interface(workspace, "accel-low", "patch", folder) is grew
        return
    with pytest.raises(RefusedError, match=rf"(?s)release minor.*{breaks}"):
        check_interface(workspace, "accel-low", "patch", folder)
    check_interface(workspace, "accel-low", "minor", tmp_path_factory.mktemp("again"))


def test_new_exports_are_noticed_and_lost_ones_break(workspace: Workspace) -> None:
    sources = [workspace.root / "packages/accel-low/src"]
    old = interface("accel_low", sources)
    init = workspace.root / "packages/accel-low/src/accel_low/__init__.py"
    init.write_text(INIT.replace("say loud=shout", "loud=shout hidden"))
    changes = compare(old, interface("accel_low", sources))
    assert changes.added == ("hidden",)
    assert len(changes.breaking) == 1
    assert "say" in changes.breaking[0]


def test_every_package_has_a_table_that_can_be_read() -> None:
    sources = sorted(ROOT.glob("packages/*/src"))
    for init in ROOT.glob("packages/*/src/*/__init__.py"):
        exports = interface(init.parent.name, sources).exports
        assert sorted(exports or ()) == sorted(exported_names(init)), init
