"""`accelerate config` on a terminal: menus, arrow keys, ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.pretended import settings_of, value_in
from tests.cli.terminal import BACKSPACE, CONTROL_C, CONTROL_D, DOWN, ENTER, UP, Terminal

pytest.importorskip("questionary")  # without it, all terminals are asked in plain lines
pytestmark = pytest.mark.launch

Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    environ = {"HF_HOME": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    return lambda *words: Terminal(*words, environ=environ)


def default_file(tmp_path: Path) -> Path:
    return tmp_path / "accelerate" / "default_config.yaml"


def test_plain_cpu(start: Start, tmp_path: Path) -> None:
    with start("config") as terminal:
        terminal.answer("Where do the processes run?", ENTER)
        terminal.answer("Hardware?", ENTER)
        terminal.answer("Train on the CPU even", "y")
        terminal.answer("Compile the model", "n")
        terminal.answer("Mixed precision?", DOWN, ENTER)
        assert terminal.finish() == 0, terminal.screen
    path = default_file(tmp_path)
    assert f"Settings written to {path}" in terminal.screen
    written = yaml.safe_load(path.read_text())
    assert written == written | {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True, "num_processes": 1,
        "num_machines": 1, "mixed_precision": "bf16", "debug": False,
    }  # fmt: skip
    assert not path.read_text().lstrip().startswith("{")
    settings = settings_of("x.py", environ={"HF_HOME": str(tmp_path)})
    assert (settings.use_cpu, settings.runner, settings.mixed_precision) == (True, "simple", "bf16")
    assert settings.sources["mixed_precision"] == "file"


def test_several_gpus_with_fsdp_2(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "new" / "fsdp.yaml"
    with start("config", "--config_file", str(path)) as terminal:
        terminal.answer("Where do the processes run?", ENTER)
        terminal.answer("Hardware?", DOWN, DOWN, ENTER)
        terminal.answer("Number of machines", ENTER)
        terminal.answer("Which training strategy?", UP, UP, ENTER)
        terminal.answer("FSDP version", ENTER)
        terminal.answer("Reshard parameters after", "n")
        terminal.answer("Offload parameters and gradients", ENTER)
        terminal.answer("units of their own", ENTER)
        terminal.answer("model declares", "n")
        terminal.answer("Class names of the blocks", "LlamaDecoderLayer, Other", ENTER)
        terminal.answer("Type of state dicts", DOWN, ENTER)
        terminal.answer("Load pretrained weights", ENTER)
        terminal.answer("Activation checkpointing", "y")
        terminal.answer("Offload checkpointed activations", "y")
        terminal.answer("Number of processes", "many", ENTER)
        terminal.answer("'many' is not an integer", BACKSPACE * 4, "4", ENTER)
        terminal.answer("Which devices", ENTER)
        terminal.answer("near its GPU", ENTER)
        terminal.answer("Debug mode", ENTER)
        terminal.answer("tensor or context parallelism", "y")
        terminal.answer("every layer", "2", ENTER)
        terminal.answer("ring attention", ENTER)
        terminal.answer("a replica of the model", ENTER)
        terminal.answer("Compile the model", "n")
        terminal.answer("Mixed precision?", DOWN, DOWN, ENTER)
        assert terminal.finish() == 0, terminal.screen
    written = yaml.safe_load(path.read_text())
    fsdp = {
        "fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,Other", "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": True,
        "fsdp_activation_checkpointing_offload": True,
    }  # fmt: skip
    sizes = {"tp_size": 2, "cp_size": 1, "dp_replicate_size": 1, "dp_shard_size": 2}
    parallelism = {f"parallelism_config_{axis}": size for axis, size in sizes.items()}
    assert written["distributed_type"] == "FSDP"
    assert written["fsdp_config"] == fsdp
    assert written["parallelism_config"] == parallelism
    settings = settings_of("--config_file", str(path), "x.py")
    assert settings.notes == ()
    assert (settings.use_fsdp, settings.num_processes, settings.mixed_precision) == (True, 4, "bf16")
    assert value_in(settings, "fsdp_version") == "2"
    assert value_in(settings, "fsdp_reshard_after_forward") == "False"
    assert value_in(settings, "fsdp_transformer_layer_cls_to_wrap") == "LlamaDecoderLayer,Other"
    assert {key: value_in(settings, key) for key in parallelism} == parallelism
    assert settings.use_parallelism_config is True


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("question", "key"),
    [
        ("Where do the processes run?", CONTROL_C),
        ("Train on the CPU even", CONTROL_C),
        ("Which GPU", CONTROL_C),
        ("Which GPU", CONTROL_D),
    ],
)
def test_interrupting_writes_nothing(start: Start, tmp_path: Path, question: str, key: str) -> None:
    answers = {"Where do the processes run?": ENTER, "Hardware?": ENTER, "Train on the CPU even": "n",
               "Which training strategy?": ENTER, "Which GPU": ENTER}  # fmt: skip
    with start("config") as terminal:
        for asked, keys in answers.items():
            terminal.answer(asked, key if asked == question else keys)
            if asked == question:
                break
        assert terminal.finish() == 130
    assert "Interrupted. Nothing was written." in terminal.screen
    assert "Traceback" not in terminal.screen
    assert not default_file(tmp_path).exists()


def test_an_existing_file_is_overwritten_when_somebody_agrees(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    content = {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 3, "mixed_precision": "bf16"}
    for key, processes in (("n", 3), ("y", 5)):
        path.write_text(yaml.safe_dump(content))
        with start("config", "--config_file", str(path)) as terminal:
            terminal.answer("Its values are the defaults")
            terminal.answer("Where do the processes run?", ENTER)
            terminal.answer("Hardware?", ENTER)
            terminal.answer("Number of machines", ENTER)
            terminal.answer("Which training strategy?", ENTER)
            terminal.answer("(3)", "5", ENTER)
            terminal.answer("Debug mode", ENTER)
            terminal.answer("mpirun?", ENTER)
            terminal.answer("Compile the model", "n")
            terminal.answer("Mixed precision?", ENTER)
            terminal.answer("num_processes: 3 -> 5")
            terminal.answer("Overwrite", key)
            assert terminal.finish() == 0, terminal.screen
        assert ("Nothing was written." in terminal.screen) == (key == "n")
        written = yaml.safe_load(path.read_text())
        assert (written["num_processes"], written["mixed_precision"]) == (processes, "bf16")


def test_a_simple_terminal_is_asked_in_plain_lines(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path), "TERM": "dumb"}
    with Terminal("config", environ=environ) as terminal:
        terminal.answer("own]:", "\n")
        terminal.answer("MPS)]:", "\n")
        terminal.answer("(yes/no) [no]:", "perhaps\n")
        terminal.answer("'perhaps' is neither yes nor no.", "y\n")
        terminal.answer("torch.compile? (yes/no) [no]:", "\n")
        terminal.answer("Choice [no]:", "bf16\n")
        assert terminal.finish() == 0, terminal.screen
    assert yaml.safe_load(default_file(tmp_path).read_text())["mixed_precision"] == "bf16"
