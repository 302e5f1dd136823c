#!/usr/bin/env python3
"""The one entry to everything a developer runs: `uv run tools/dev.py --help`."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
XLA = ROOT / ".venv-xla"
XLA_PYTHON, XLA_VERSIONS = "3.11", ("torch==2.9.0", "torch_xla==2.9.0", "transformers>=5.0")
LOWEST = ROOT / ".venv-lowest"
LOWEST_PYTHON = "3.11"
NEWEST = ROOT / ".venv-newest"
TORCHFT = "torchft==0.2.0"
SAGEMAKER = "sagemaker>=2.232,<3"
EXTRAS_OF_LOWEST = {  # those whose libraries the tests use; trackers, quantization and clients have groups of their own
    "accel-bigmodel": "hub", "accel-data": "stateful", "accel-state": "numa", "accel-tracking": "progress",
}  # fmt: skip


def run(*command: str, **environment: str) -> int:
    """Run a command from the repository root, shown as typed."""
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode


def test(arguments: list[str]) -> int:
    """Run the tests; further arguments go to pytest."""
    return run(sys.executable, "-m", "pytest", *arguments, OMP_NUM_THREADS="1")


def cover(arguments: list[str]) -> int:
    """Run the tests and report what they covered, per package."""
    for old in ROOT.glob(".coverage*"):
        old.unlink()
    code = run(sys.executable, "-m", "coverage", "run", "-m", "pytest", *arguments, OMP_NUM_THREADS="1")
    run(sys.executable, "-m", "coverage", "combine", "-q")
    for package in sorted(PACKAGES.iterdir()):
        print(f"--- {package.name}")
        run(sys.executable, "-m", "coverage", "report", f"--include={package}/*", "--skip-covered")
    return code


def lint(arguments: list[str]) -> int:
    """Check style, format, words, overrides, and that modules import one another one way only."""
    return (
        run("ruff", "check", *arguments, ".")
        | run("ruff", "format", "--check", ".")
        | run("lint-imports", "--no-cache")
        | run(sys.executable, "tools/check_cycles.py")
        | run(sys.executable, "tools/check_overrides.py")
        | run(sys.executable, "tools/check_words.py")
    )


def types(arguments: list[str]) -> int:
    """Check types over the packages."""
    return run(sys.executable, "-m", "mypy", *arguments)


def stubs(arguments: list[str]) -> int:
    """Write the `.pyi` files of the umbrella's lazy packages."""
    return run(sys.executable, "tools/make_stubs.py", *arguments)


def versions(arguments: list[str]) -> int:
    """Check that every package's bounds on its siblings admit the versions in this workspace."""
    return run(sys.executable, "tools/check_versions.py", *arguments)


def release(arguments: list[str]) -> int:
    """Release one package: version, changelog, bounds, files, tests, tag."""
    return run(sys.executable, "tools/release.py", *arguments)


def bench(arguments: list[str]) -> int:
    """Measure against the raw floor and against accelerate 1.15, in an environment of its own."""
    return run(sys.executable, "-m", "tools.bench", *arguments)


def differential(arguments: list[str]) -> int:
    """Compare behaviour with accelerate 1.15, called as a black box in an environment of its own."""
    sys.path.insert(0, str(ROOT))
    from tools.reference import reference_python

    chosen = (
        arguments
        if any(argument.startswith("tests/") for argument in arguments)
        else ["tests/differential", *arguments]
    )
    return run(
        sys.executable, "-m", "pytest", *chosen, OMP_NUM_THREADS="1", REFERENCE_PYTHON=str(reference_python())
    )  # fmt: skip


def released(arguments: list[str]) -> int:
    """Run the released tests of accelerate 1.15 on it and on this library, and compare."""
    return run(sys.executable, "tools/released_tests.py", *arguments)


def lowest(arguments: list[str]) -> int:
    """Run the tests with the lowest versions of other packages that ours say they work with."""
    python = LOWEST / "bin" / "python"
    install = ["uv", "pip", "install", "-q", "--no-config", "--python", str(python)]  # torch is not held at the lock's
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        ours = [
            part for name in PACKAGES.iterdir() for part in ("-e", f"{name}[{EXTRAS_OF_LOWEST.get(name.name, '')}]")
        ]
        code = run("uv", "venv", "-q", "--clear", "--python", LOWEST_PYTHON, str(LOWEST)) or run(
            *install, "--resolution", "lowest-direct", *ours
        )
        frozen = subprocess.run(["uv", "pip", "freeze", "--exclude-editable", "-p", str(python)], capture_output=True)
        pins.write_bytes(frozen.stdout)
        code = code or run(*install, "-c", str(pins), "--group", "dev", "--group", "examples", "setuptools")
    others = [f"--ignore=tests/{folder}" for folder in ("clients", "tracking/services", "differential")]
    return code or run(str(python), "-m", "pytest", *others, *arguments, OMP_NUM_THREADS="1", VIRTUAL_ENV="")


def newest(arguments: list[str]) -> int:
    """Run the tests of long sequences and of models that arrive sharded with the newest transformers, trl and peft."""
    python = NEWEST / "bin" / "python"
    install = ["uv", "pip", "install", "-q", "--no-config", "--python", str(python)]
    ours = [part for package in PACKAGES.iterdir() for part in ("-e", str(package))]
    code = run("uv", "venv", "-q", "--clear", "--python", LOWEST_PYTHON, str(NEWEST)) or run(
        *install, "--upgrade", *ours, "--group", "dev", "transformers", "trl", "peft"
    )
    tests = arguments or ["--all", "tests/clients/test_sharded_at_load.py", "tests/clients/test_long_sequences.py"]
    return code or run(str(python), "-m", "pytest", *tests, OMP_NUM_THREADS="1", VIRTUAL_ENV="")


def matrix(arguments: list[str]) -> int:
    """Run the tests with several versions of torch and Python, each pair in an environment of its own."""
    return run(sys.executable, "tools/matrix.py", *arguments)


def mutation(arguments: list[str]) -> int:
    """Plant mistakes and compare what a short run of the tests notices with what all of them do."""
    return run(sys.executable, "tools/mutation.py", *arguments)


def planted(arguments: list[str]) -> int:
    """Plant the defects that were found once, and see whether the tests notice each of them."""
    return run(sys.executable, "tools/planted.py", *arguments)


def wheels(arguments: list[str]) -> int:
    """Build all packages and try each one alone in an empty environment."""
    return run(sys.executable, "tools/check_wheels.py", *arguments)


def apart(group: str, tests: Sequence[str], arguments: list[str]) -> int:
    """Run tests in an environment of their own, with a group of packages that nothing else is tested with."""
    groups = ["--no-default-groups", "--group", "dev", "--group", group]
    return run(
        "uv", "run", "--locked", "--all-packages", *groups, "pytest", *tests, *arguments,
        UV_PROJECT_ENVIRONMENT=f".venv-{group}", VIRTUAL_ENV="", OMP_NUM_THREADS="1", LIBRARIES_REQUIRED="1",
    )  # fmt: skip


def trackers(arguments: list[str]) -> int:
    """Try every tracker against its real library, offline, in an environment of its own."""
    return apart("trackers", ["tests/tracking/services"], arguments)


def quantization(arguments: list[str]) -> int:
    """Try what uses bitsandbytes and torchao against the real libraries, in an environment of its own."""
    examples = "tests/examples/test_running.py::test_8_bit_floats_reach_what_they_promise"
    tests = ["tests/integrations/test_bitsandbytes.py", "tests/integrations/test_torchao.py", examples]
    return apart("quantization", tests, arguments)


def megatron(arguments: list[str]) -> int:
    """Train with Megatron-LM on the real megatron-core, on the CPU, in an environment of its own."""
    return apart("megatron", ["tests/megatron"], arguments)


def ray(arguments: list[str]) -> int:
    """Launch and train through the real Ray Train, on a cluster of three nodes on this machine, in an environment of its own."""
    return apart("ray", ["tests/ray"], arguments)


def torchft(arguments: list[str]) -> int:
    """Train in the replica groups of the real torchft, one of which is killed, in an environment of its own.

    It is not in the lock: nothing else is tested with it.
    """
    groups = ["--no-default-groups", "--group", "dev", "--with", TORCHFT]
    return run(
        "uv", "run", "--isolated", "--all-packages", *groups, "pytest", "-n", "1", "tests/torchft", *arguments,
        OMP_NUM_THREADS="1", VIRTUAL_ENV="", LIBRARIES_REQUIRED="1",
    )  # fmt: skip


def install_system_packages(missing: Sequence[str], packages: Sequence[str], arguments: list[str]) -> list[str]:
    """Install what a command needs besides Python, but only with `--install` or `CI=true`: else print how.

    Returns:
        The arguments without `--install`.
    """
    rest = [argument for argument in arguments if argument != "--install"]
    if missing:
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        if which("apt-get") and (rest != arguments or os.environ.get("CI") == "true"):
            run(*([] if os.geteuid() == 0 else ["sudo"]), *command)
        else:
            print(
                f"Not installed: {', '.join(missing)}. What needs it is skipped. Install it with --install, which runs"
            )
            print("   ", " ".join(command), flush=True)
    return rest


def clusters(arguments: list[str]) -> int:
    """Run jobs on a real SLURM and by ssh on two nodes of this machine; `--install` installs these first."""
    missing = [name for name in ("slurmctld", "sshd", "pdsh", "ompi_info") if which(name) is None]
    packages = ("slurm-wlm", "munge", "openssh-server", "pdsh", "openmpi-bin")
    arguments = install_system_packages(missing, packages, arguments)
    return run("uv", "run", "pytest", "-n", "1", "tests/clusters", *arguments)


def xla(arguments: list[str]) -> int:
    """Try training through the real torch_xla, on its CPU runtime, in an environment of its own.

    It is not in the lock: torch_xla needs an older torch.
    """
    python = str(XLA / "bin" / "python")
    ours = [part for name in sorted(PACKAGES.iterdir()) for part in ("-e", str(name))]
    install = ["uv", "pip", "install", "-q", "--no-config", "--python", python, *ours, *XLA_VERSIONS]
    code = run("uv", "venv", "-q", "--allow-existing", "--python", XLA_PYTHON, str(XLA)) or run(
        *install, "--group", "dev", "setuptools"
    )
    return code or run(
        python, "-m", "pytest", "tests/xla", *arguments, OMP_NUM_THREADS="1", VIRTUAL_ENV="", LIBRARIES_REQUIRED="1"
    )


def sagemaker(arguments: list[str]) -> int:
    """Start a job with the real SDK of Amazon SageMaker, whose answers are made up, in an environment of its own.

    It is not in the lock: the SDK holds back packages that others need in newer versions. It needs no torch.
    """
    sources = [str(ROOT / "packages" / name / "src") for name in ("accel-state", "accel-cli")]
    return run(
        "uv", "run", "--isolated", "--no-project", "--with", SAGEMAKER, "--with", "pytest", "--with", "questionary",
        "python", "-m", "pytest", "--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider",
        str(ROOT / "tests/cli/test_launch_sagemaker_sdk.py"), *arguments,
        PYTHONPATH=os.pathsep.join([*sources, str(ROOT)]), VIRTUAL_ENV="", LIBRARIES_REQUIRED="1",
    )  # fmt: skip


def docs(arguments: list[str]) -> int:
    """Build the documentation site and check it, in an environment of its own; `--serve` shows it.

    `--install` installs a browser first, which the tests of the search need. `--publish VERSION` puts it under that version on the branch `gh-pages`, and pushes that; not with `--local`.
    """
    started = [
        "uv", "run", "--locked", "--all-packages", "--no-default-groups", "--group", "dev", "--group", "docs",
    ]  # fmt: skip
    variables = {"UV_PROJECT_ENVIRONMENT": ".venv-docs", "VIRTUAL_ENV": "", "NO_MKDOCS_2_WARNING": "true"}
    if arguments[:1] == ["--serve"]:
        return run(*started, "mkdocs", "serve", "--watch", "packages", *arguments[1:], **variables)
    if arguments[:1] == ["--publish"]:
        push = [] if "--local" in arguments else ["--push"]
        variables["DOCS_VERSIONED"] = "1"
        return run(*started, "mike", "deploy", *push, "--update-aliases", arguments[1], "latest", **variables) or run(
            *started, "mike", "set-default", *push, "latest", **variables
        )
    has_browser = any(map(which, ("chromium", "chromium-browser", "google-chrome")))  # which asks the site's search
    install_system_packages([] if has_browser else ["chromium"], ["chromium"], arguments)
    tests = ["pytest", "tests/docs/test_notebook.py", "tests/docs/test_search.py", "-n", "0"]
    return (
        run(*started, "mkdocs", "build", "--strict", **variables)
        or run(*started, "python", "-m", "tools.docs.check", **variables)
        or run(*started, *tests, LIBRARIES_REQUIRED="1", OMP_NUM_THREADS="1", **variables)
    )


def shape(arguments: list[str]) -> int:
    """Show the longest files and functions, and figures of the whole: a guide to the eye, never a gate."""
    sources = sorted(PACKAGES.glob("*/src/**/*.py"))
    files = sorted(((len(path.read_text().splitlines()), path) for path in sources), reverse=True)
    functions = sorted((entry for path in sources for entry in _functions(path)), reverse=True)
    print("Longest files")
    for lines, path in files[:15]:
        print(f"{lines:6}  {path.relative_to(PACKAGES)}")
    print("Longest functions, without their docstrings")
    for lines, where in functions[:15]:
        print(f"{lines:6}  {where}")
    return run(sys.executable, "tools/shape.py", *arguments)


def _functions(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documentation = ast.get_docstring(node, clean=False) or ""
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - documentation.count("\n")
            yield lines, f"{path.relative_to(PACKAGES)}:{node.lineno} {node.name}"


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command
    for command in (
        test,
        trackers,
        quantization,
        megatron,
        ray,
        clusters,
        xla,
        torchft,
        sagemaker,
        docs,
        cover,
        lint,
        types,
        stubs,
        versions,
        bench,
        differential,
        released,
        lowest,
        newest,
        matrix,
        mutation,
        planted,
        wheels,
        release,
        shape,
    )
}


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=(command.__doc__ or "").splitlines()[0], add_help=False)
    chosen, rest = parser.parse_known_args()
    command = COMMANDS[chosen.command]
    if rest in (["-h"], ["--help"]):
        print(command.__doc__)
        return 0
    return command(rest)


if __name__ == "__main__":
    sys.exit(main())
