"""`accelerate runs`: lists, shows, compares and exports what the tracker "local" recorded."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.main import main
from accel_tracking.local.record import FILE, FOLDER
from tests.cli.running import python


def write_run(
    folder: Path, name: str, started: float, losses: list[float], end: str | None = "finished", **settings: object
) -> None:
    """Write a record by hand, as the tracker does."""
    lines: list[dict[str, object]] = [
        {"kind": "start", "format": 1, "name": name.partition("-")[0], "continued": False, "command": ["train.py"],
         "host": "elsewhere", "pid": 1, "pid_started": None, "time": started},
        {"kind": "settings", "values": settings, "time": started},
        *({"step": step, "time": started + step, "values": {"loss": loss, "lr": 0.1}} for step, loss in enumerate(losses)),
    ]  # fmt: skip
    if end:
        lines.append({"kind": "end", "status": end, "reason": None, "time": started + 75})
    (folder / FOLDER / name).mkdir(parents=True)
    (folder / FOLDER / name / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_run(tmp_path / "logs", "digits-1", 1000.0, [1.0, 0.5, 0.25], rate=0.1, model={"width": 8})
    write_run(tmp_path / "logs", "digits-2", 2000.0, [1.0, 0.8], end=None, rate=0.2, model={"width": 8})
    write_run(tmp_path / "other", "letters-1", 3000.0, [3.0], end="failed", rate=0.1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["runs", *words]) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_the_list_shows_the_newest_first_with_their_curve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys).splitlines()
    assert lines[0].split() == ["#", "run", "status", "started", "time", "step", "loss", "lowest"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["1", "letters-1", "failed"], ["2", "digits-2", "lost"], ["3", "digits-1", "finished"],
    ]  # fmt: skip
    assert lines[3].endswith("1 min 15 s     2  0.25    0.25  █▃▁")


def test_the_list_can_be_narrowed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(said(capsys, "list", "--name", "digits", "--limit", "1").splitlines()) == 2
    assert "digits-2" in said(capsys, "--name", "digits", "--limit", "1")
    assert "lr" in said(capsys, "--metric", "lr").splitlines()[0]
    assert len(said(capsys, "list", "3", "1").splitlines()) == 3
    assert "letters" not in said(capsys, "--dir", "logs")


def test_show_tells_everything_about_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split()[:2] for line in said(capsys, "show", "digits-1").splitlines()]
    for pair in (["status", "finished"], ["command", "train.py"], ["model.width", "8"], ["loss", "3"]):
        assert pair in lines
    assert "letters-1" in said(capsys, "show")  # the newest


def test_a_run_is_named_in_several_ways(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, run in {"3": "digits-1", "digits-1": "digits-1", "digits": "digits-2", "lett": "letters-1"}.items():
        assert said(capsys, "show", word).splitlines()[0].split() == ["run", run]
    assert "could be 'digits-2' or 'digits-1'" in said(capsys, "show", "digits-", status=2)
    assert "There is no run 'digit-1'" in said(capsys, "show", "digit-1", status=2)
    assert "Did you mean 'digits-1'?" in said(capsys, "show", "digit-1", status=2)


def test_compare_shows_the_settings_that_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in said(capsys, "compare", "digits-1", "digits-2").splitlines()]
    assert lines[0] == ["digits-1", "digits-2"]
    assert ["rate", "0.1", "0.2"] in lines
    assert ["loss", "0.25", "0.8"] in lines
    assert not any("width" in word for line in lines for word in line)
    assert len(said(capsys, "compare").splitlines()[0].split()) == 3  # the newest ones
    assert "only one run to compare" in said(capsys, "compare", "1", status=2)


def test_csv_has_every_point(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Wrote 3 runs to points.csv" in said(capsys, "--csv", "points.csv")
    with open("points.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert ["digits-1", "digits", "loss", "1", "1001.0", "0.5"] in [list(row.values()) for row in rows]
    assert said(capsys, "show", "digits-1", "--csv", "-").splitlines()[0] == "run,name,metric,step,time,value"


def test_html_is_one_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Wrote 2 runs to page.html" in said(capsys, "compare", "3", "2", "--html", "page.html")
    text = Path("page.html").read_text()
    assert "digits-1" in text
    assert "letters-1" not in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dir", "nowhere"], "The folder 'nowhere' does not exist."),
        (["--metric", "los"], "has a metric 'los'. Did you mean 'loss'?"),
        (["--name", "digit"], "No run has the name 'digit'. Did you mean 'digits'?"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--html", "nowhere/page.html"], "'nowhere/page.html' cannot be written: No such file or directory."),
    ],
)
def test_mistakes_are_told_in_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    text = said(capsys, *words, status=2)
    assert problem in text
    assert len(text.splitlines()) == 1


def test_no_runs_is_no_error_but_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert 'log_with="local"' in said(capsys, status=1)


def test_the_command_loads_no_torch(folder: Path) -> None:
    program = (
        "import sys; from accel_cli.main import main; main(['runs']); main(['runs', 'compare', '--html', 'p.html']);"
        "print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    )
    assert python("-c", program).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("environ", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
                         ids=["ascii", "C locale"])  # fmt: skip
def test_terminals_without_utf_8_get_curves_of_ascii(tmp_path: Path, environ: dict[str, str]) -> None:
    write_run(tmp_path, "lauf-\u00fc", 1000.0, [4.0, 3.0, 2.0, 1.0])
    command = [sys.executable, "-m", "accel_cli", "runs"]
    files = {name: tmp_path / name for name in ("a.csv", "a.html")}
    for words in (["list"], ["show"], ["list", "--csv", str(files["a.csv"]), "--html", str(files["a.html"])]):
        done = subprocess.run([*command, *words, "--dir", str(tmp_path)], env={**os.environ, **environ},
                              capture_output=True, check=True)  # fmt: skip
        lines = done.stdout.decode("ascii").splitlines()
        assert words != ["list"] or lines[1].endswith("#+,_"), lines
        assert words != ["show"] or any(line.split()[-1:] == [":."] for line in lines), lines
    assert all("lauf-\u00fc" in file.read_text(encoding="utf-8") for file in files.values())
