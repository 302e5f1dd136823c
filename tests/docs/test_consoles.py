"""What pages show in a terminal: `console` blocks run beside the page's titled files, and print what is shown.

A line of `...` stands for any lines, `...` within a line for any text. Every command line of `accelerate` on any page,
in blocks that do not run as well, is one that the program accepts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.main import COMMANDS, full_parser, main
from tests.support.output import GLOO, own_lines, without_gloo

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
FILE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^    \S.*\n)+", re.MULTILINE)
RUN = [ROOT / "docs" / "first-change.md", ROOT / "docs" / "launch.md"]
RUN += [page for folder in ("start", "how-to") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether output is what a page shows."""
    patterns = [".*" if line.strip() == "..." else ".*".join(map(re.escape, line.split("..."))) for line in shown]
    # a line of dots stands for several lines
    joined = "\n".join(patterns).replace("\n.*\n", "\n(?:.*\n)*")
    joined = re.sub(r"\A\.\*\n", "(?:.*\n)*", joined)
    joined = re.sub(r"\n\.\*\Z", "(?:\n.*)*", joined)
    return re.fullmatch(joined, "\n".join(printed)) is not None


@pytest.mark.parametrize(
    ("shown", "printed", "fits"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["a", "c"], False),
        (["a ... c"], ["a b c"], True),
        (["...", "c"], ["a", "b", "c"], True),
        (["...", "c"], ["a", "b"], False),
        (["a", "...", "c"], ["a", "c"], True),
        (["a", "..."], ["a", "b", "c"], True),
        (["a"], ["a", "b"], False),
    ],
)
def test_dots_stand_for_any_text(shown: list[str], printed: list[str], fits: bool) -> None:
    assert matches(shown, printed) is fits


NEEDED = {"several-deepspeed-models": "deepspeed"}
"""Libraries that pages need, which are not in every environment."""
PORT = "29500"  # the default, which another program may be using


@given(st.lists(st.booleans(), min_size=14, max_size=14), st.integers(1, 12))
def test_what_gloo_prints_is_left_out_however_two_ranks_cut_it(turns: list[bool], peers: int) -> None:
    def writes(rank: int) -> list[str]:
        expected = " peer ranks. Expected number of connected peer ranks is : "
        return ["[Gloo] Rank ", str(rank), " is connected to ", str(peers), expected, str(peers), "\n"]

    first, second, printed = writes(0), writes(11), ""
    for turn in turns:
        printed += (first if (turn and first) or not second else second).pop(0)
    assert own_lines(printed + "3 ranks\n\nis 1\n") == ["3 ranks", "is 1"]
    assert without_gloo("1\n\nis connected to") == ["1", "", "is connected to"], "what others print is left alone"


def sessions(text: str) -> list[tuple[str, list[str]]]:
    """Commands of the console blocks of a page, with the lines that they are shown to print."""
    found: list[tuple[str, list[str]]] = []
    for block in CONSOLE.findall(text):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line.replace(PORT, "..."))
    return found


@pytest.mark.launch
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "page", [page for page in RUN if CONSOLE.search(page.read_text())], ids=lambda page: page.stem
)
def test_consoles_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    if page.stem in NEEDED:
        pytest.importorskip(NEEDED[page.stem])
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content)
    programs = Path(sys.executable).parent
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    (tmp_path / "train.py").touch()
    for command, shown in sessions(text):
        ran = subprocess.run(
            ["env", *shlex.split(command)], cwd=tmp_path, env={**os.environ, **variables}, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        printed = without_gloo(ran.stdout.rstrip())
        if GLOO in ran.stdout:  # ends of its lines may be left
            shown, printed = [line for line in shown if line], [line for line in printed if line]
        assert matches(shown, printed), f"{command} printed\n{ran.stdout}"


def command_lines(text: str) -> list[list[str]]:
    """The words of each command line that begins with `accelerate` and one of its commands."""
    blocks = [*FENCED.findall(text), *INDENTED.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.M))]
    found = []
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line.strip().removeprefix("$ "), comments=True) if "accelerate" in line else []
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words[:1] == ["accelerate"] and words[1:2] and words[1] in COMMANDS and "..." not in words:
            found.append(words[1:])
    return found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if command_lines(page.read_text())], ids=lambda page: page.name
)
def test_commands_are_accepted(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for words in command_lines(page.read_text()):
        try:
            full_parser().parse_args(words)
        except SystemExit as ended:
            if ended.code:
                wrong.append(f"{' '.join(words)}: {capsys.readouterr().err.strip().splitlines()[-1]}")
    assert wrong == []


BASH = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def bash_commands(page: Path) -> list[list[str]]:
    """What can be done here of the `bash` blocks of a page: launches are planned; nothing needs a person, MPI or a cluster."""
    found = []
    for words in command_lines("".join(f"```bash\n{block}```\n" for block in BASH.findall(page.read_text()))):
        asks = words[0] == "config" and words[1:2] not in (["default"], ["update"])
        if not asks and "--submit" not in words and ("--mpirun_hostfile" not in words or shutil.which("mpirun")):
            found.append(["launch", "--dry_run", *words[1:]] if words[0] == "launch" else words)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if bash_commands(page)], ids=lambda page: page.name)
def test_bash_blocks_do_what_can_be_done_here(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in (
        "train.py",
        "train.sh",
        "package/train.py",
        "docs/examples/digits.py",
        "docs/examples/megatron_lm.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "train.sh").chmod(0o755)
    (tmp_path / "hosts").write_text("worker1 slots=8\nworker2 slots=8\n")
    for name in ("fsdp.yaml", "old.yaml"):
        (tmp_path / name).write_text("distributed_type: 'NO'\nnum_processes: 1\n")
    for command in bash_commands(page):
        assert main(command) == 0, f"{' '.join(command)}: {capsys.readouterr().err}"
