"""Every option that has a variable: flag, then config file, then environment, then a guess or the default."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_cli.arguments import Flag
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.flags.table import GROUPS, value_of
from accel_cli.launch.plan import make_plan
from accel_cli.launch.settings import LaunchSettings
from accel_state.settings.compile import MISSPELT_BACKENDS
from accel_state.settings.option import BOOLEAN
from tests.cli.pretended import Pretended, settings_of
from tests.cli.running import PROGRAM, run

# what makes a group's options count
NEEDED: dict[str, list[str]] = {
    "FSDP Arguments": ["--use_fsdp"],
    "DeepSpeed Arguments": ["--use_deepspeed"],
    "Megatron-LM Arguments": ["--use_megatron_lm"],
    "FP8 Arguments": ["--mixed_precision", "fp8"],
    "ParallelismConfig Arguments": ["--use_parallelism_config"],
    "TPU": ["--tpu"],
    "MPI Arguments": ["--cpu", "--mpirun_hostfile", "hosts"],
}
SIZES = dict.fromkeys((f"PARALLELISM_CONFIG_{axis}_SIZE" for axis in ("CP", "SP", "PP")), "2")
SECTIONS = {
    "fsdp_": "fsdp_config", "fp8_": "fp8_config", "dynamo_": "dynamo_config", "megatron_lm_": "megatron_lm_config",
    "parallelism_config_": "parallelism_config", "mpirun_": "mpirun_config",
}  # fmt: skip


def candidates(option: Flag) -> tuple[Any, Any, Any]:
    """Three values for the flag, the file and the variable; the first and last differ from the second."""
    if option.is_switch:
        return True, True, True
    if option.kind.closed and not (option.type is BOOLEAN.parse or option.kind.exact):
        words = option.kind.choices
        last = "false" if words[0] == "true" else words[-1]
        return words[0], last, words[0]
    if option.choices:
        choices = [choice for choice in option.choices if choice not in MISSPELT_BACKENDS]
        return choices[0], choices[-1], choices[len(choices) // 2]
    name = getattr(option.type, "__name__", "")
    if option.name == "fp8_override_linear_precision":
        return "true,false,true", "false,true,false", "true,true,false"
    return {
        "int": ("3", "4", "5"),
        "float": ("3.5", "4.5", "5.5"),
        "bool": ("true", "false", "true"),
    }.get(name, ("one", "two", "three"))


ROWS = [
    pytest.param(group, option, id=option.name) for group in GROUPS for option in group.options if option.environment
]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost\n")

    def write_file(option: Flag, value: Any) -> str:
        prefix = next((prefix for prefix in SECTIONS if option.name.startswith(prefix)), None)
        section = SECTIONS[prefix] if prefix else "deepspeed_config" if "ACCELERATE_" in option.environment else ""
        if option.name in TOP_LEVEL:
            section = ""
        content: dict[str, Any] = {"distributed_type": "NO"}
        content |= {section: {option.name: value}} if section else {option.name: value}
        Path("a.json").write_text(json.dumps(content))
        return "a.json"

    return write_file


TOP_LEVEL = ("mixed_precision", "debug", "enable_cpu_affinity", "downcast_bf16", "num_cpu_threads_per_process")


def variables_for(option: Flag, value: Any) -> dict[str, str]:
    names = option.environment.split()
    texts = value.split(",") if len(names) > 1 else [str(value)]
    return dict(zip(names, texts, strict=True))


def settle(group: OptionGroup, option: Flag, *words: str, environ: dict[str, str]) -> LaunchSettings:
    needed = [] if option.name == "mixed_precision" else NEEDED.get(group.title, [])
    sizes = SIZES if group.title.startswith("ParallelismConfig") else {}
    machine = Pretended(mpi="mpirun (Open MPI) 4.1.4")
    return settings_of(*needed, *words, "x.py", environ=sizes | environ, machine=machine)


def flag_words(option: Flag, value: Any) -> list[str]:
    flag = option.flags.split()[-1]
    return [flag] if option.is_switch else [flag, str(value)]


@pytest.mark.sample(40)
@pytest.mark.parametrize(("group", "option"), ROWS)
def test_each_source_gives_way_to_the_one_before(group: OptionGroup, option: Flag, write: Callable[..., str]) -> None:
    by_flag, by_file, by_variable = candidates(option)
    environ = variables_for(option, by_variable)
    name = option.name
    can_be_in_a_file = name not in ("num_cpu_threads_per_process", "shutdown_timeout")  # which have no key

    settings = settle(group, option, environ=environ)
    assert settings.sources[name] == "environment", settings.sources
    from_environment = group.value(option, settings)
    variable_first = option.environment.split()[0]
    assert variable_first not in make_plan(settings, environ).environment  # reaches the script as it is

    if can_be_in_a_file:
        file = write(option, by_file if not option.is_switch else True)
        settings = settle(group, option, "--config_file", file, environ=environ)
        assert settings.sources[name] == "file"
        if by_file != by_variable:
            assert group.value(option, settings) != from_environment

    if option.flags:
        more = ["--config_file", file] if can_be_in_a_file else []
        settings = settle(group, option, *more, *flag_words(option, by_flag), environ=environ)
        assert settings.sources[name] == "flag"
        variables = dict(pair[1:] for pair in group.variables(settings) if pair[0] == name)
        if variables:  # some values of a switch are not handed on
            assert variables.items() <= make_plan(settings, environ).environment.items()

    settings = settle(group, option, environ=dict.fromkeys(variables_for(option, by_variable), ""))
    assert settings.sources.get(name) in (None, "guess", *(["environment"] if variable_first in SIZES else []))


@pytest.mark.parametrize(
    ("variable", "switch"),
    [
        ("ACCELERATE_USE_FSDP", "use_fsdp"),
        ("ACCELERATE_USE_DEEPSPEED", "use_deepspeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "use_megatron_lm"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "use_parallelism_config"),
    ],
)
def test_ways_of_training(variable: str, switch: str) -> None:
    assert getattr(settings_of("x.py", environ={variable: "true"}), switch) is True
    assert getattr(settings_of("x.py", environ={variable: "false"}), switch) is False
    with pytest.raises(ValueError, match=f"{variable}: 'perhaps' is not true or false"):
        settings_of("x.py", environ={variable: "perhaps"})


def test_another_way_of_training_on_the_command_line_switches_the_variables_off() -> None:
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    settings = settings_of("--use_megatron_lm", "x.py", environ=environ)
    assert settings.use_fsdp is False
    assert make_plan(settings, environ).environment["ACCELERATE_USE_FSDP"] == "false"


def test_hardware_on_the_command_line_counts_more_than_the_variable() -> None:
    environ = {"ACCELERATE_USE_CPU": "true"}
    words = ["--multi_gpu", "--num_processes", "2", "x.py"]
    assert make_plan(settings_of(*words, environ=environ), environ).environment["ACCELERATE_USE_CPU"] == "False"
    assert "ACCELERATE_USE_CPU" not in make_plan(settings_of(*words), {}).environment
    plan = make_plan(settings_of("--num_processes", "1", "x.py", environ=environ), environ)
    assert plan.environment["ACCELERATE_USE_CPU"] == "True"


def test_wrong_variables_are_named() -> None:
    with pytest.raises(ValueError, match=r"variable FSDP_VERSION: '3' is not one of 1, 2"):
        settings_of("--use_fsdp", "x.py", environ={"FSDP_VERSION": "3"})
    assert value_of(settings_of("x.py", environ={"FSDP_VERSION": "3"}), "fsdp_version") == "1"  # nobody asks for it


def test_numbers_that_deepspeed_finds_itself() -> None:
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto", "ACCELERATE_GRADIENT_CLIPPING": "auto"}
    settings = settings_of("--use_deepspeed", "x.py", environ=environ)
    assert value_of(settings, "gradient_accumulation_steps") == "auto"
    assert value_of(settings, "gradient_clipping") == "auto"


@pytest.mark.parametrize("word", ["torhchxla_trace_once", "torchxla_trace_once"])
def test_a_backend_that_accelerate_1_misspells(word: str) -> None:
    settings = settings_of("--dynamo_backend", word, "x.py")
    assert make_plan(settings, {}).environment["ACCELERATE_DYNAMO_BACKEND"] == "TORCHXLA_TRACE_ONCE"


def test_fsdp_on_the_cpu_is_fsdp(tmp_path: Path) -> None:
    flags = settings_of("--cpu", "--use_fsdp", "--num_processes", "2", "x.py")
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"distributed_type": "FSDP", "num_processes": 2, "use_cpu": True}))
    from_file = settings_of("--config_file", str(file), "x.py")
    both = settings_of("--cpu", "--config_file", str(file), "x.py")
    for settings in (flags, from_file, both):
        variables = make_plan(settings, {}).environment
        assert variables["ACCELERATE_USE_FSDP"] == "true"
        assert variables["ACCELERATE_USE_CPU"] == "True"


STATE = """
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
state = AcceleratorState(fsdp_plugin=FullyShardedDataParallelPlugin(), _from_accelerator=True)
print(f"{state.distributed_type.value}{state.fsdp_plugin.fsdp_version}")
state.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.launch
def test_the_state_says_fsdp_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "state.py").write_text(STATE)
    words = ["--cpu", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", str(tmp_path / "state.py")]
    done = run(PROGRAM, "launch", *words, HF_HOME=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.stdout.count("FSDP2") == 2, done.stderr
