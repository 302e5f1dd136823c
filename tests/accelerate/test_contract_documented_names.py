"""Names that documents of earlier releases mention and 1.15 lacks: they work, or say what has taken their place."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelerate.utils
from accel_cli.configfile.read import load_config_from_file
from accel_cli.launch.command import launch_command_parser
from accel_cli.questionnaire.machine import MPI
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType, dispatch_model
from accelerate.utils import (
    DeepSpeedEngineWrapper,
    FP8RecipeKwargs,
    LoggerType,
    ProjectConfiguration,
    gather_across_data_parallel_groups,
    is_ipex_available,
)
from tests.cli.pretended import Pretended, plan_of

OPEN_MPI = "mpirun (Open MPI) 4.1.4"

Checks = dict[str, Callable[..., None]]
CHECKS: Checks = {}


def name(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which documented names a check is about."""

    def note(check: Callable[..., None]) -> Callable[..., None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return note


DOCUMENTED = [
    "--deepeed_config_file",
    "--fsdp_backward_prefetch_policy",
    "--ipex",
    "--use_distributed_optimizer",
    "--use_xpu",
    "dynamo_backend",
    "fsdp_config.fsdp_backward_prefetch_policy",
    "ipex_config",
    "ipex_config.ipex",
    "mpirun_config.mpirun_ccl",
    "accelerate-env",
    "accelerate-test",
    "DataLoaderConfiguration.use_seedable_sampler, ProjectConfiguration.project_dir='.' as printed",
    "LoggerType.COMET_ML = 'comet_ml'",
    "Accelerator(downcast_bf16=)",
    "Accelerator(even_batches=)",
    "Accelerator(kwarg_handler=)",
    "Accelerator(kwarg_handlers=)",
    "Accelerator.on_local_process(local_process_idx=)",
    "FP8RecipeKwargs(optimization_level=)",
    "dispatch_model(strict=)",
    "DeepSpeedEnginerWrapper (heading of DeepSpeedEngineWrapper)",
    "FP8KwargsHandler (class name used in prose)",
    "ProjectConfiguration.iteration_checkpoints",
    "ProjectConfiguration.save_every_n_steps",
    "accelerate.Accelerator.check_breakpoint",
    "accelerate.Accelerator.load_checkpoint",
    "accelerate.Accelerator.set_breakpoint",
    "accelerate.Accelerator.utils.gather_across_data_parallel_groups (as written; a function of accelerate.utils.megatron_lm)",
    "accelerate.DistributedType.TPU",
    "accelerate.utils.is_ipex_available",
    "config questionnaire: number of oneCCL worker threads",
    "config questionnaire: whether to use IPEX on CPU",
]


@pytest.mark.parametrize("documented", DOCUMENTED)
def test_a_documented_name(
    documented: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    check = CHECKS[documented]
    check(**{name: request.getfixturevalue(name) for name in inspect.signature(check).parameters})


def test_no_check_is_without_a_name() -> None:
    assert set(CHECKS) == set(DOCUMENTED)


# ---- command line -------------------------------------------------------------------------------------------------


@name("--deepeed_config_file", "--use_distributed_optimizer")
def misspelt_flags_are_refused_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words, right in (
        ("--deepeed_config_file ds.json x.py", "--deepspeed_config_file"),
        ("--use_distributed_optimizer x.py", "--megatron_lm_use_distributed_optimizer"),
    ):
        with pytest.raises(SystemExit):
            launch_command_parser().parse_args(words.split())
        assert capsys.readouterr().err.rstrip().endswith(f"did you mean {right} for {words.split()[0]}?")


@name("--fsdp_backward_prefetch_policy")
def the_old_flag_sets_the_variable() -> None:
    words = ["--use_fsdp", "--num_processes", "2", "--fsdp_backward_prefetch_policy", "BACKWARD_POST", "x.py"]
    assert plan_of(*words).environment["FSDP_BACKWARD_PREFETCH"] == "BACKWARD_POST"


@name("--ipex", "--use_xpu")
def retired_flags_are_accepted_and_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from accel_cli.launch.resolve import resolve

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for flag in ("--ipex", "--use_xpu"):
        settings = resolve(launch_command_parser().parse_args(["--cpu", flag, "x.py"]))
        assert any(flag in note for note in settings.notes), settings.notes


@name("accelerate-env", "accelerate-test")
def programs_of_their_own_are_there() -> None:
    from accelerate.commands import env, test

    programs = {
        entry.name: entry.load() for entry in entry_points(group="console_scripts") if "accelerate" in entry.name
    }
    assert programs["accelerate-env"] is env.main
    assert programs["accelerate-test"] is test.main


# ---- config files -----------------------------------------------------------------------------------------------


def written(folder: Path, **values: Any) -> str:
    path = folder / "a.json"
    path.write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", **values}))
    return str(path)


@name("dynamo_backend")
def the_old_key_becomes_a_section(tmp_path: Path) -> None:
    config: Any = load_config_from_file(written(tmp_path, distributed_type="NO", dynamo_backend="INDUCTOR"))
    assert config.dynamo_config == {"dynamo_backend": "INDUCTOR"}


@name("fsdp_config.fsdp_backward_prefetch_policy")
def the_old_key_sets_the_variable(tmp_path: Path) -> None:
    section = {"fsdp_backward_prefetch_policy": "BACKWARD_POST"}
    path = written(tmp_path, distributed_type="FSDP", num_processes=2, fsdp_config=section)
    assert plan_of("--config_file", path, "x.py").environment["FSDP_BACKWARD_PREFETCH"] == "BACKWARD_POST"


@name("ipex_config", "ipex_config.ipex", "config questionnaire: whether to use IPEX on CPU")
def settings_of_intels_extension_are_dropped(tmp_path: Path) -> None:
    config: Any = load_config_from_file(written(tmp_path, distributed_type="NO", ipex_config={"ipex": True}))
    assert not hasattr(config, "ipex_config")


@name("mpirun_config.mpirun_ccl", "config questionnaire: number of oneCCL worker threads")
def the_workers_of_oneccl_are_asked_for_and_set(tmp_path: Path) -> None:
    assert [question.key for question in MPI.questions] == ["uses_mpirun", "mpirun_hostfile", "mpirun_ccl"]
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    section = {"mpirun_hostfile": str(hosts), "mpirun_ccl": "3"}
    path = written(tmp_path, distributed_type="MULTI_CPU", num_processes=2, use_cpu=True, mpirun_config=section)
    plan = plan_of("--config_file", path, "x.py", machine=Pretended(mpi=OPEN_MPI))
    assert plan.environment["CCL_WORKER_COUNT"] == "3"


# ---- Python -------------------------------------------------------------------------------------------------------


@name("DataLoaderConfiguration.use_seedable_sampler, ProjectConfiguration.project_dir='.' as printed")
def defaults_are_those_of_the_release() -> None:
    assert DataLoaderConfiguration().use_seedable_sampler is False
    assert ProjectConfiguration().project_dir is None


@name("LoggerType.COMET_ML = 'comet_ml'")
def trackers_have_two_spellings() -> None:
    assert LoggerType.COMET_ML is LoggerType.COMETML is LoggerType("comet_ml")
    assert LoggerType.list().count("comet_ml") == 1


@name("accelerate.DistributedType.TPU")
def tpus_are_what_xla_drives() -> None:
    assert DistributedType.TPU is DistributedType.XLA is DistributedType("TPU")
    assert pickle.loads(pickle.dumps(DistributedType.TPU)) is DistributedType.XLA
    with pytest.raises(ValueError, match="NOTHING"):
        DistributedType("NOTHING")


@name("Accelerator(even_batches=)")
def loader_settings_may_be_given_apart() -> None:
    with pytest.warns(
        FutureWarning, match=r"even_batches= is deprecated.*DataLoaderConfiguration\(even_batches=False"
    ):
        accelerator = Accelerator(cpu=True, even_batches=False, dataloader_config=DataLoaderConfiguration(data_seed=3))
    assert accelerator.even_batches is False
    assert accelerator.dataloader_config.data_seed == 3


@name("Accelerator(downcast_bf16=)")
def downcasting_acts_like_its_variable() -> None:
    with pytest.warns(FutureWarning, match="ACCELERATE_DOWNCAST_BF16"):
        Accelerator(cpu=True, downcast_bf16=True)
    assert os.environ["ACCELERATE_DOWNCAST_BF16"] == "true"

    with pytest.warns(FutureWarning, match="ACCELERATE_DOWNCAST_BF16"):
        Accelerator(cpu=True, downcast_bf16=False)
    assert "ACCELERATE_DOWNCAST_BF16" not in os.environ


@name("Accelerator(kwarg_handler=)", "Accelerator(kwarg_handlers=)")
def handlers_have_three_names() -> None:
    handler = accelerate.utils.AutocastKwargs(cache_enabled=False)
    for old in ("kwarg_handler", "kwarg_handlers"):
        with pytest.warns(FutureWarning, match=f"{old}= is deprecated: write kwargs_handlers="):
            accelerator = Accelerator(cpu=True, **{old: [handler]})  # type: ignore[arg-type]
        assert accelerator.autocast_handler is handler
        with pytest.raises(TypeError, match="Pass only kwargs_handlers"):
            Accelerator(cpu=True, kwargs_handlers=[], **{old: [handler]})  # type: ignore[arg-type]
    assert inspect.signature(Accelerator) == inspect.signature(Accelerator)


@name("Accelerator.on_local_process(local_process_idx=)")
def the_local_process_has_two_names() -> None:
    with pytest.warns(FutureWarning, match="local_process_index"):
        assert Accelerator(cpu=True).on_local_process(lambda: "ran", local_process_idx=0)() == "ran"  # type: ignore[call-arg]


@name("accelerate.Accelerator.check_breakpoint", "accelerate.Accelerator.set_breakpoint")
def breakpoints_are_triggers() -> None:
    accelerator: Any = Accelerator(cpu=True)
    with pytest.warns(FutureWarning, match=r"set_breakpoint\(\) is deprecated\. Call set_trigger\(\)"):
        accelerator.set_breakpoint()
    with pytest.warns(FutureWarning, match=r"Call check_trigger\(\)"):
        assert accelerator.check_breakpoint() is True
    assert accelerator.check_trigger() is False


@name("accelerate.Accelerator.load_checkpoint")
def a_checkpoint_is_a_state(tmp_path: Path) -> None:
    accelerator: Any = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "state")
    before = model.weight.item()
    nn.init.constant_(model.weight, 7)
    with pytest.warns(FutureWarning, match=r"Call load_state\(\)"):
        accelerator.load_checkpoint(tmp_path / "state")
    assert model.weight.item() == before


@name("FP8RecipeKwargs(optimization_level=)")
def the_level_of_a_recipe_has_two_names() -> None:
    with pytest.warns(FutureWarning, match="MSAMPRecipeKwargs"):
        recipe = FP8RecipeKwargs(backend="MSAMP", optimization_level="O1")
    assert recipe.opt_level == "O1"
    with pytest.raises(ValueError, match="opt_level='O2' and optimization_level='O1'"):
        FP8RecipeKwargs(backend="MSAMP", opt_level="O2", optimization_level="O1")


@name("dispatch_model(strict=)")
def maps_may_be_checked_strictly() -> None:
    with pytest.raises(ValueError, match="Linear: 'nothing'"):
        dispatch_model(nn.Linear(1, 1), {"": "cpu", "nothing": "cpu"}, strict=True)
    with pytest.warns(UserWarning, match="Linear: 'nothing'"):
        model = dispatch_model(nn.Linear(1, 1), {"": "cpu", "nothing": "cpu"})
    assert model(torch.ones(1)).shape == (1,)


@name("DeepSpeedEnginerWrapper (heading of DeepSpeedEngineWrapper)", "FP8KwargsHandler (class name used in prose)")
def misspelt_classes_are_found_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="Import DeepSpeedEngineWrapper"):
        assert accelerate.utils.DeepSpeedEnginerWrapper is DeepSpeedEngineWrapper
    with pytest.warns(FutureWarning, match="Import FP8RecipeKwargs"):
        assert accelerate.utils.FP8KwargsHandler is FP8RecipeKwargs


@name("ProjectConfiguration.iteration_checkpoints")
def numbered_checkpoints_are_named_automatically() -> None:
    with pytest.warns(FutureWarning, match="use automatic_checkpoint_naming=True"):
        config = ProjectConfiguration("runs", iteration_checkpoints=True)
    assert config.automatic_checkpoint_naming is True
    assert not ProjectConfiguration("runs").automatic_checkpoint_naming


@name("ProjectConfiguration.save_every_n_steps")
def saving_is_done_by_the_loop() -> None:
    with pytest.warns(FutureWarning, match=r"saves nothing by itself: call save_state\(\).*every 5 steps"):
        ProjectConfiguration("runs", save_every_n_steps=5)


@name(
    "accelerate.Accelerator.utils.gather_across_data_parallel_groups (as written; a function of accelerate.utils.megatron_lm)"
)
def it_is_a_function_of_the_utilities() -> None:
    assert gather_across_data_parallel_groups({"a": torch.ones(1)})["a"].tolist() == [1.0]


@name("accelerate.utils.is_ipex_available")
def intels_extension_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", ModuleType("intel_extension_for_pytorch"))
    assert is_ipex_available()
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)
    assert not is_ipex_available()
