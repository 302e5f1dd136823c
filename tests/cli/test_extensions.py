"""Packages from outside add commands and options: everything stands in one place of theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_cli.extensions import COMMANDS_GROUP, OPTIONS_GROUP, entry_points
from accel_cli.launch.flags import table
from accel_cli.main import main
from tests.cli.pretended import plan_of, settings_of, value_in
from tests.cli.running import PROGRAM, python, run

SETTINGS = """
from dataclasses import dataclass
from accel_state.settings.option import BOOLEAN, at_least, option, resolve_options

@dataclass
class Paint:
    width: int = option(None, kind=at_least(1), env="PAINT_WIDTH", flag="--paint_width", help="In pixels.", fallback=3)
    style: str = option(None, choices=("round", "flat"), env="PAINT_STYLE", flag="--paint_style", help="Of the brush.",
                        launch_default=None)
    soft: bool = option(None, kind=BOOLEAN, env="PAINT_SOFT", key="paint_soft", help="Soft.", launch_default=None)

    def __post_init__(self):
        resolve_options(self)
"""
COMMAND = """
def add_arguments(parser):
    parser.add_argument("--colour", default="red")

def run(args):
    print(f"painted {args.colour}")
    return 4
"""
ENTRY_POINTS = """
[console_scripts]
unrelated = a:b

[accelerate.commands]
paint = paint_command

[accelerate.options]
paint = paint_settings:Paint
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` with an installed package."""
    folder = tmp_path / "installed"
    (folder / "paint-1.0.dist-info").mkdir(parents=True)
    (folder / "paint-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "paint_settings.py").write_text(SETTINGS)
    (folder / "paint_command.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(str(folder))
    table.plugin_groups.cache_clear()
    yield folder
    table.plugin_groups.cache_clear()
    for name in ("paint_settings", "paint_command"):
        sys.modules.pop(name, None)


def test_entry_points_are_read_from_small_files(outside: Path) -> None:
    assert entry_points(OPTIONS_GROUP)["paint"] == "paint_settings:Paint"
    assert entry_points(COMMANDS_GROUP)["paint"] == "paint_command"
    assert "unrelated" not in entry_points(COMMANDS_GROUP)


@pytest.mark.usefixtures("outside")
def test_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paint", "--colour", "blue"]) == 4
    assert capsys.readouterr().out == "painted blue\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "paint " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["pant"])
    assert "Did you mean 'paint'?" in capsys.readouterr().err


@pytest.mark.usefixtures("outside")
def test_flags() -> None:
    words = ["--cpu", "--paint_width", "7", "--paint-style", "flat", "--no_python", "ls"]
    settings = settings_of(*words)
    assert (value_in(settings, "paint_width"), settings.sources["paint_width"]) == (7, "flag")
    variables = plan_of(*words).environment
    assert {name: text for name, text in variables.items() if name.startswith("PAINT")} == {
        "PAINT_WIDTH": "7",
        "PAINT_STYLE": "flat",
    }


@pytest.mark.usefixtures("outside")
def test_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: 'NO'\nuse_cpu: true\npaint_config:\n  width: 5\n  paint_soft: true\n")
    words = ["--config_file", str(path), "--no_python", "ls"]
    settings = settings_of(*words)
    assert (value_in(settings, "paint_width"), settings.sources["paint_width"]) == (5, "file")
    assert plan_of(*words).environment["PAINT_WIDTH"] == "5"
    assert plan_of(*words).environment["PAINT_SOFT"] == "True"
    path.write_text("distributed_type: 'NO'\nuse_cpu: true\npaint_config:\n  width: wide\n")
    with pytest.raises(ValueError, match=r"line 4: paint_config\.width: 'wide' is not an integer of at least 1"):
        settings_of(*words)


def test_the_section_is_unknown_without_the_package(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: 'NO'\npaint_config:\n  width: 5\n")
    with pytest.raises(ValueError, match="paint_config"):
        settings_of("--config_file", str(path), "x.py")


@pytest.mark.parametrize(("words", "looks"), [(["--cpu", "{script}"], False), (["--help"], True)])
def test_nobody_looks_for_packages_without_need(tmp_path: Path, words: list[str], looks: bool) -> None:
    script = tmp_path / "a.py"
    script.write_text("")
    code = (
        "import sys, accel_cli.extensions as e, accel_cli.main as m\n"
        "from accel_cli.main import COMMANDS\n"
        "from accel_cli.launch.resolve import resolve\n"
        "parser = COMMANDS['launch'].make_parser()\n"
        f"words = {[word.format(script=script) for word in words]!r}\n"
        "try:\n"
        "    resolve(parser.parse_args(words))\n"
        "except SystemExit:\n"
        "    pass\n"
        f"assert (e._all.cache_info().misses > 0) is {looks}\n"  # the help names every flag
        "late = [name for name in sys.modules if name.startswith('accel_state.settings.')]\n"
        f"assert ('accel_state.settings.fsdp' in late) is {looks}\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = python("-c", code, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.launch
def test_a_process_finds_the_values(outside: Path, tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("from paint_settings import Paint\nprint(Paint())\n")
    words = ["launch", "--cpu", "--paint_width", "9", str(script)]
    done = run(PROGRAM, *words, PYTHONPATH=str(outside), HF_HOME=str(tmp_path))
    assert "Paint(width=9, style=None, soft=None)" in done.stdout, done.stderr
