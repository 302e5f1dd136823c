"""`accelerate examples`: what is listed and copied, and what every example has in common."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from accel_cli.examples.catalog import FILES, read_examples
from accel_cli.main import main
from tests.examples.gallery import BLOCK, shown_runs
from tests.examples.launched import check

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"language_modeling"}
PROGRAMS = sorted(FILES.rglob("*.py"))
EXPECTED = """
nlp_example cv_example complete_nlp_example complete_cv_example multigpu_remote_launcher sagemaker_example
by_feature/automatic_gradient_accumulation by_feature/checkpointing by_feature/cross_validation by_feature/ddp_comm_hook
by_feature/deepspeed_with_config_support by_feature/early_stopping by_feature/fsdp_with_peak_mem_tracking
by_feature/gradient_accumulation by_feature/gradient_accumulation_for_autoregressive_models by_feature/local_sgd
by_feature/language_modeling
by_feature/megatron_lm_gpt_pretraining by_feature/memory by_feature/multi_process_metrics by_feature/profiler
by_feature/schedule_free by_feature/tracking inference/distributed/captions inference/distributed/image inference/distributed/speech
inference/distributed/speech_generation inference/distributed/text
inference/pippy/bert inference/pippy/gpt2 inference/pippy/llama inference/pippy/t5
torch_native_parallelism/fsdp2_fp8 torch_native_parallelism/nd_parallel torch_native_parallelism/nd_parallel_trainer
alst_ulysses_sequence_parallelism/sp_alst config_yaml_templates deepspeed_config_templates slurm
torch_native_parallelism/configs
"""


def functions_of(path: Path) -> dict[str, str]:
    """The text of the functions of a program."""
    text = path.read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in found}


def test_the_list_has_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(read_examples()) == sorted(EXPECTED.split())
    assert main(["examples", "list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert sorted(listed) == sorted(EXPECTED.split())
    assert main(["examples", "list", "diffusion"]) == 0
    assert capsys.readouterr().out.startswith("inference/distributed/image")
    assert main(["examples", "list", "nothing of the kind"]) == 1


@pytest.mark.parametrize("name", ["checkpointing", "checkpointing.py", "by_feature/checkpointing"])
def test_an_example_is_copied_under_each_of_its_names(name: str, tmp_path: Path) -> None:
    assert main(["examples", "copy", name, str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "checkpointing.py").read_bytes() == (FILES / "by_feature/checkpointing.py").read_bytes()


def test_what_an_example_needs_comes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "copy", "deepspeed_with_config_support"]) == 0
    copied = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    stages = {f"deepspeed_config_templates/{path.name}" for path in FILES.glob("deepspeed_config_templates/*")}
    assert copied == {"deepspeed_with_config_support.py", "language_modeling.py", *stages}
    assert len(stages) == 6  # and what says which is which


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    existing = tmp_path / "slurm" / "submit_multigpu.sh"
    existing.parent.mkdir()
    existing.write_text("mine")
    assert main(["examples", "copy", "slurm", str(tmp_path)]) == 2
    assert "submit_multigpu.sh already exists" in capsys.readouterr().err
    assert existing.read_text() == "mine"
    assert list(existing.parent.iterdir()) == [existing]


@pytest.mark.parametrize(
    ("word", "near"), [("checkpont", "by_feature/checkpointing"), ("pippy", "inference/pippy/bert"), ("xyzzy", "")]
)
def test_a_wrong_name_is_answered_with_near_ones(word: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "copy", word]) == 2
    said = capsys.readouterr().err
    assert f"There is no example '{word}'" in said
    assert "`accelerate examples list` shows all" in said
    assert (f"{near}" in said) if near else ("Near" not in said)


def test_copy_without_a_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "copy"]) == 2
    assert "copy needs the name of an example" in capsys.readouterr().err


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_each_program_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= (240 if path.stem.startswith("complete_") else 180 if path.stem in SHARED else 150)
    said = ast.get_docstring(ast.parse(text)) or ""
    assert path.name in said
    assert "accelerate launch" in said


def test_no_program_removes_files() -> None:
    removing = re.compile(r"rmtree|unlink|os\.remove|rmdir")
    programs = [*FILES.rglob("*.py"), *(ROOT / "docs" / "examples").glob("*.py")]
    assert [path.name for path in programs if removing.search(path.read_text())] == []


def test_features_differ_from_the_plain_loop_in_the_feature_only() -> None:
    plain = functions_of(FILES / "cv_example.py")
    shared = 0
    for path in FILES.glob("by_feature/*.py"):
        if "import load_digits" not in path.read_text():
            continue  # a language model
        for name, text in functions_of(path).items():
            if name != "main" and name in plain:
                shared += 1
                assert text == plain[name], f"{path.name}: {name} differs from cv_example.py"
    assert shared >= 30


@pytest.mark.skipif(not FILES.resolve().is_relative_to(ROOT), reason="accel-cli is installed elsewhere")
def test_the_top_level_folder_is_the_same() -> None:
    assert (ROOT / "examples").resolve() == FILES.resolve()


def test_the_page_has_the_table() -> None:
    link = "../packages/accel-cli/src/accel_cli/examples/example-files"
    rows = [
        f"| [`{one.name}`]({link}/{one.path.relative_to(FILES).as_posix()}) | {one.summary} |"
        for one in read_examples().values()
    ]
    page = (ROOT / "docs" / "examples.md").read_text()
    table = "\n".join(["| name | what it shows |", "|---|---|", *rows])
    assert table in page, f"docs/examples.md needs this table:\n{table}"


def test_the_gallery_shows_every_program_and_what_it_promises() -> None:
    shown = dict(BLOCK.findall((ROOT / "docs" / "examples.md").read_text()))
    runs = {run.words: run for group in shown_runs() for run in group}
    assert shown.keys() == runs.keys(), "python -m tests.examples.gallery writes it"
    for words, printed in shown.items():
        if "\n...\n" not in printed:  # what is left out may be what the run must say
            check(runs[words], printed)


@pytest.mark.parametrize("readme", sorted(FILES.rglob("README.md")), ids=lambda path: path.parent.name)
def test_the_readme_of_a_folder_names_its_files(readme: Path) -> None:
    links = set(re.findall(r"\]\(([^)#]+)\)", readme.read_text()))
    assert all((readme.parent / link).exists() for link in links if "://" not in link)
    below = [path for path in readme.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(readme.parent).as_posix() for path in below if path != readme}
    missing = {path for path in expected if not any(path == link or path.startswith(f"{link}/") for link in links)}
    assert not missing


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_the_wheel_has_every_file(tmp_path: Path) -> None:
    subprocess.run(
        ["uv", "build", "-q", str(ROOT / "packages" / "accel-cli"), "--wheel", "-o", str(tmp_path)], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {
        name.partition("examples/example-files/")[2] for name in zipfile.ZipFile(wheel).namelist() if name[-1] != "/"
    }
    files = {path.relative_to(FILES).as_posix() for path in FILES.rglob("*") if path.is_file()}
    assert names - {""} == {name for name in files if "__pycache__" not in name}
