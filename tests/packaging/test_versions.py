"""Packages agree on one another's versions, and the check would notice if they did not."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tools.check_versions import problems

PACKAGES = Path(__file__).resolve().parents[2] / "packages"


def projects() -> dict[str, dict[str, object]]:
    return {path.parent.name: tomllib.loads(path.read_text())["project"] for path in PACKAGES.glob("*/pyproject.toml")}


def test_the_workspace_agrees() -> None:
    assert problems(projects()) == []


def test_a_raised_version_is_noticed() -> None:
    changed = projects()
    changed["accel-state"]["version"] = "0.2.0"
    assert any("accel-ops needs accel-state" in line for line in problems(changed))


def test_a_missing_upper_bound_is_noticed() -> None:
    changed = projects()
    changed["accel-ops"]["dependencies"] = ["accel-state>=0.1"]
    assert problems(changed) == ["accel-ops needs accel-state>=0.1: a sibling needs an upper bound"]


def test_the_umbrella_writes_the_same_programs_as_the_package_that_has_them() -> None:
    """pip installs accel-cli, removes an older accelerate with its programs, and then installs the umbrella."""
    programs = projects()["accel-cli"]["scripts"]
    assert projects()["accelerate"]["scripts"] == programs
    assert programs["accelerate"] == "accel_cli.main:main"  # type: ignore[index]


def test_every_package_ships_the_license_and_links_that_work_everywhere() -> None:
    for package in sorted(PACKAGES.glob("*/pyproject.toml")):
        folder = package.parent
        assert (folder / "LICENSE").read_bytes() == (PACKAGES.parent / "LICENSE").read_bytes()
        assert projects()[folder.name]["license-files"] == ["LICENSE"]
        assert "](../" not in (folder / "README.md").read_text(), "PyPI cannot follow a link into the repository"


def test_reviews_can_be_asked_for_each_package_and_for_nothing_that_is_gone() -> None:
    root = PACKAGES.parent
    lines = (root / ".github" / "CODEOWNERS").read_text().splitlines()
    paths = {line.split()[0] for line in lines if line and not line.startswith("#")}
    assert {f"/packages/{name}/" for name in projects()} <= paths
    assert all((root / path.strip("/")).exists() for path in paths - {"*"})


def test_the_umbrella_satisfies_the_field() -> None:
    from packaging.specifiers import SpecifierSet

    assert str(projects()["accelerate"]["version"]) in SpecifierSet(">=1.13")
