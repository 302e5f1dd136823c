"""Release one package: the version, its changelog, its siblings' bounds, the files, a tag.

    uv run tools/dev.py release accel-ops minor --dry_run   # show everything, change nothing
    uv run tools/dev.py release accel-ops minor             # commit and tag `accel-ops-v0.2.0`

Everything is done in a copy of the repository's last commit. Only when the package has been built, checked, installed
alone and tested there, the commit and its tag come to the branch that is checked out. The files are left in `dist/`,
the notes beside them; pushing the tag lets the release workflow publish them.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("first", "patch", "minor", "major")
UNRELEASED = "## Unreleased"
SECTION = re.compile(r"^## Unreleased\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class RefusedError(Exception):
    """The package cannot be released as it is."""


@dataclass(frozen=True)
class Workspace:
    """The repository, or a copy of it at one commit.

    Args:
        root: Its folder.
    """

    root: Path

    @property
    def packages(self) -> dict[str, Path]:
        """Folder of each package by its name."""
        return {path.parent.name: path.parent for path in sorted(self.root.glob("packages/*/pyproject.toml"))}

    def project(self, package: str) -> dict[str, Any]:
        """The `[project]` table of a package."""
        table: dict[str, Any] = tomllib.loads((self.packages[package] / "pyproject.toml").read_text())["project"]
        return table

    @property
    def address(self) -> str:
        """Where the repository is published: `tool.release.repository`; empty until somebody fills it."""
        settings = tomllib.loads((self.root / "pyproject.toml").read_text())["tool"].get("release", {})
        return str(settings.get("repository", "")).rstrip("/")

    def run(self, *command: str, **environment: str) -> str:
        """Run a command here and return what it printed.

        Raises:
            RefusedError: When it fails.
        """
        done = subprocess.run(
            command, cwd=self.root, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RefusedError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def last_release(self, package: str) -> str | None:
        """The tag of a package's last release; in a clone without tags, the commit that it would be on."""
        tags = self.run("git", "tag", "--list", f"{package}-v*", "--sort=-v:refname").split()
        commit = self.run("git", "log", "-1", "--format=%H", f"--grep=^Release {package} [0-9]").strip()
        return tags[0] if tags else commit or None


# ---- what changes in the sources --------------------------------------------------------------------------------


def next_version(current: str, step: str) -> str:
    """The version after a step; `"first"` releases the one that is written down."""
    major, minor, patch = Version(current).release
    return {
        "first": current,
        "patch": f"{major}.{minor}.{patch + 1}",
        "minor": f"{major}.{minor + 1}.0",
        "major": f"{major + 1}.0.0",
    }[step]


def bounds(version: str) -> str:
    """What a sibling asks for: at least this, and less than the next version that may break it.

    Before 1.0 that is the next minor version, from then on the next major one (semver.org, 4 and 8).
    """
    major, minor, _ = Version(version).release
    return f">={version},<{major + 1}" if major else f">={version},<0.{minor + 1}"


def date_changelog(text: str, version: str, day: str) -> tuple[str, str]:
    """Move what is unreleased into a dated section.

    Returns:
        The new text, and the notes: what the section says.

    Raises:
        RefusedError: When nothing is unreleased.
    """
    found = SECTION.search(text)
    notes = found[1].strip() if found else ""
    if found is None or not notes:
        raise RefusedError(f"CHANGELOG.md has nothing under {UNRELEASED!r}: write down what changed.")
    dated = f"{UNRELEASED}\n\n## {version} - {day}\n\n{notes}\n\n"
    rest = text[found.end() :]
    return text[: found.start()] + (f"{dated}{rest}" if rest else dated.rstrip("\n") + "\n"), notes


def write_version(workspace: Workspace, package: str, version: str) -> None:
    """Write a package's new version wherever the package says it."""
    folder = workspace.packages[package]
    current = workspace.project(package)["version"]
    _replace(folder / "pyproject.toml", f'version = "{current}"', f'version = "{version}"')
    for init in folder.glob("src/*/__init__.py"):
        if "__version__ = " in init.read_text():
            _replace(init, f'__version__ = "{current}"', f'__version__ = "{version}"')
    head = f'name = "{package}"\nversion = '
    _replace(workspace.root / "uv.lock", f'{head}"{current}"', f'{head}"{version}"')


def raise_bounds(workspace: Workspace, package: str, version: str, *, always: bool) -> list[str]:
    """Let the siblings ask for a version, where theirs does not admit it, or where they may use what is new in it.

    Args:
        workspace: Where they are.
        package: What was released.
        version: Its new version.
        always: The interface grew.

    Returns:
        The siblings whose bounds changed.
    """
    changed = []
    for sibling, folder in workspace.packages.items():
        path = folder / "pyproject.toml"
        text = path.read_text()

        def raised(found: re.Match[str]) -> str:
            admits = Version(version) in SpecifierSet(found[2])
            return found[0] if admits and not always else f'"{package}{found[1] or ""}{bounds(version)}"'

        new = re.sub(rf'"{re.escape(package)}(\[[^]]*\])?([<>=!~][^"]*)"', raised, text)
        if new != text:
            path.write_text(new)
            changed.append(sibling)
    return changed


def write_urls(workspace: Workspace, package: str) -> None:
    """Write the project's addresses into a package's metadata, once the repository has one."""
    path = workspace.packages[package] / "pyproject.toml"
    urls = (
        f'[project.urls]\nRepository = "{workspace.address}"\n'
        f'Documentation = "{workspace.address}/tree/HEAD/docs"\n'
        f'Changelog = "{workspace.address}/blob/HEAD/packages/{package}/CHANGELOG.md"\n\n'
    )
    text = re.sub(r"^\[project\.urls\]\n.*?\n\n(?=\[)", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    path.write_text(text.replace("[build-system]", urls + "[build-system]", 1))


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if old not in text:
        raise RefusedError(f"{path} does not contain {old!r}")
    path.write_text(text.replace(old, new, 1))


# ---- what must hold ---------------------------------------------------------------------------------------------


def check_interface(workspace: Workspace, package: str, step: str, folder: Path) -> bool:
    """Compare the interface with that of the last release.

    Returns:
        True when it grew.

    Raises:
        RefusedError: For a breaking change in a step that promises none.
    """
    from tools.public_interface import compare, interface

    tag = workspace.last_release(package)
    if tag is None:
        return True
    module = package.replace("-", "_")
    old = check_out(workspace, tag, folder / "last")
    changes = compare(
        interface(module, sorted(old.root.glob("packages/*/src"))),
        interface(module, sorted(workspace.root.glob("packages/*/src"))),
    )
    breaks = "major" if Version(workspace.project(package)["version"]).major else "minor"
    if changes.breaking and STEPS.index(step) < STEPS.index(breaks):
        listed = "\n  ".join(changes.breaking)
        raise RefusedError(
            f"{step} release of {package}: its interface breaks since {tag}; release {breaks}.\n  {listed}"
        )
    for line in changes.breaking:
        print(f"breaks: {line}")
    for name in changes.added:
        print(f"new: {name}")
    return bool(changes.added)


def build(workspace: Workspace, package: str, folder: Path) -> list[Path]:
    """Build wheel and sdist twice, and see that both times give the same bytes.

    Raises:
        RefusedError: When they differ, or when PyPI would not take them.
    """
    moment = workspace.run("git", "log", "-1", "--format=%ct").strip()
    builds = []
    for name in ("first", "second"):
        where = folder / name
        workspace.run(
            "uv", "build", "-q", "--package", package, "--no-sources", "-o", str(where), SOURCE_DATE_EPOCH=moment
        )
        builds.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _distributions(where)})
    if builds[0] != builds[1]:
        raise RefusedError(f"{package}: two builds differ: {builds[0]} and {builds[1]}")
    built = _distributions(folder / "first")
    workspace.run("uvx", "twine", "check", "--strict", *map(str, built))
    workspace.run("uvx", "check-wheel-contents", *(str(path) for path in built if path.suffix == ".whl"))
    return built


def _distributions(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))


def build_siblings(workspace: Workspace, package: str, folder: Path, *, dry_run: bool) -> None:
    """Build the wheels of the other packages into one folder: as they were last released, or as they are here where they come next."""
    for sibling in workspace.packages:
        if sibling == package:
            continue
        tag = workspace.last_release(sibling)
        source = workspace if tag is None else check_out(workspace, tag, folder / tag)
        reason = _reason_for_the_next(workspace, source, package, sibling, dry_run)
        if reason:
            print(f"{sibling} {reason}: taken as it is here")
            source = workspace
        source.run("uv", "build", "-q", "--package", sibling, "--wheel", "--no-sources", "-o", str(folder))


def _reason_for_the_next(
    workspace: Workspace, released: Workspace, package: str, sibling: str, dry_run: bool
) -> str | None:
    """Why a package is tried with a sibling as it will be released next; None if its last release serves."""
    if released is workspace:
        return "was never released"
    version = workspace.project(package)["version"]
    asked = (Requirement(text) for text in released.project(sibling).get("dependencies", ()))
    if not all(version in one.specifier for one in asked if one.name == package):
        return f"as released does not admit {package} {version}"
    unreleased = SECTION.search((workspace.packages[sibling] / "CHANGELOG.md").read_text())
    if dry_run and unreleased is not None and unreleased[1].strip():
        return "has changes to release, too"
    return None


def check_out(workspace: Workspace, commit: str, folder: Path) -> Workspace:
    """A clone of the repository at a commit."""
    workspace.run("git", "clone", "-q", "--no-checkout", str(workspace.root), str(folder))
    copy = Workspace(folder)
    copy.run("git", "checkout", "-q", "--detach", commit)
    return copy


def try_package(workspace: Workspace, package: str, built: list[Path], folder: Path, *, dry_run: bool = False) -> None:
    """Install wheel and sdist alone, run the README's example; then run its tests with the siblings of its users.

    In a dry run, what is not released of siblings is taken for released.
    """
    from tools.check_wheels import readme_example
    from tools.environments import install, make_environment

    wheels = folder / "wheels"
    wheels.mkdir()
    build_siblings(workspace, package, wheels, dry_run=dry_run)
    script = folder / "example.py"
    script.write_text(readme_example(workspace.packages[package]))
    for file in built:
        python = make_environment(folder / f"alone-{file.suffix[1:]}")
        install(python, f"{package} @ {file.as_uri()}", wheels=wheels)
        if not subprocess.check_output([python, str(script)], cwd=folder, text=True).strip():
            raise RefusedError(f"{package}: the example of its README prints nothing")
        print(f"{file.name}: installs alone, its README's example runs", flush=True)
    others = [name for name in workspace.packages if name != package]
    wheel = next(file for file in built if file.suffix == ".whl")
    python = make_environment(folder / "tested")
    groups = ("--group", "dev", "--group", "examples")
    install(python, f"{package} @ {wheel.as_uri()}", *others, *groups, wheels=wheels, cwd=workspace.root)
    command = [str(python), "-m", "pytest", "-q", f"tests/{package.removeprefix('accel-')}"]
    print("$", *command, flush=True)
    if subprocess.run(command, cwd=workspace.root, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode:
        raise RefusedError(f"{package}: its tests fail with these siblings")


# ---- the whole --------------------------------------------------------------------------------------------------


def release(package: str, step: str, *, dry_run: bool, tests: bool = True) -> None:
    """Release a package, or show what a release would do.

    Raises:
        RefusedError: When it cannot be released; nothing has changed then.
    """
    here = Workspace(ROOT)
    if package not in here.packages:
        raise RefusedError(f"{package!r} is none of {', '.join(here.packages)}")
    if here.run("git", "status", "--porcelain"):
        raise RefusedError("There are uncommitted changes: commit them first, a release is made of what is committed.")
    if step == "first" and here.last_release(package):
        raise RefusedError(f"{package} was released before ({here.last_release(package)}): say patch, minor or major.")
    if not here.address:
        print("The metadata will name no project URLs: repository in [tool.release] of pyproject.toml is empty.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = check_out(here, "HEAD", folder / "copy")
        grew = check_interface(copy, package, step, folder)
        version = next_version(copy.project(package)["version"], step)
        notes = edit(copy, package, version, grew=grew)
        tag = f"{package}-v{version}"
        if dry_run:
            print(copy.run("git", "diff"))
        copy.run("git", *_author(here), "commit", "-qam", f"Release {package} {version}")
        built = build(copy, package, folder / "built")
        if tests:
            (folder / "tried").mkdir()
            try_package(copy, package, built, folder / "tried", dry_run=dry_run)
        print(f"\n{tag}\n\n{notes}\n")
        if dry_run:
            print("Nothing was changed (--dry_run).")
            return
        _take_over(here, copy, tag, notes, built)
    print(f"Released here; publish it with: git push && git push origin {tag}")


def _author(workspace: Workspace) -> list[str]:
    """Options of git that name the author who is configured there."""
    names = {key: workspace.run("git", "config", "--default", "", key).strip() for key in ("user.name", "user.email")}
    return [word for key, value in names.items() if value for word in ("-c", f"{key}={value}")]


def edit(workspace: Workspace, package: str, version: str, *, grew: bool) -> str:
    """Write version, changelog, addresses, the siblings' bounds and the lock; return the notes."""
    changelog = workspace.packages[package] / "CHANGELOG.md"
    text, notes = date_changelog(
        changelog.read_text(), version, datetime.datetime.now(datetime.UTC).date().isoformat()
    )
    changelog.write_text(text)
    write_version(workspace, package, version)
    if workspace.address:
        write_urls(workspace, package)
    for sibling in raise_bounds(workspace, package, version, always=grew):
        print(f"{sibling} asks for {package}{bounds(version)} now")
    workspace.run("uv", "lock", "-q", "--check")
    return notes


def _take_over(here: Workspace, copy: Workspace, tag: str, notes: str, built: list[Path]) -> None:
    dist = here.root / "dist"
    dist.mkdir(exist_ok=True)
    for file in built:
        shutil.copy2(file, dist)
    (dist / f"{tag}.md").write_text(notes + "\n")
    here.run("git", "fetch", "-q", str(copy.root), "HEAD")
    here.run("git", "merge", "-q", "--ff-only", "FETCH_HEAD")
    here.run("git", "tag", "-a", tag, "-m", notes)


def main(arguments: list[str]) -> int:
    """Release what the command line says."""
    parser = argparse.ArgumentParser(
        prog="release", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("package", help="for example accel-ops")
    parser.add_argument("step", choices=STEPS, help="first: the version that is written down")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="show what would be done")
    parser.add_argument(
        "--no_tests", action="store_true", help="only with --dry_run: build, but install and test nothing"
    )
    options = parser.parse_args(arguments)
    if options.no_tests and not options.dry_run:
        parser.error("--no_tests goes with --dry_run: what is released is tested")
    try:
        release(options.package, options.step, dry_run=options.dry_run, tests=not options.no_tests)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
