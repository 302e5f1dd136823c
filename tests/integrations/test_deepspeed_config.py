"""What fills DeepSpeed's configuration, and what is refused before DeepSpeed is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_integrations.engines.deepspeed.config import fill_auto_values, find_hidden_size
from accel_integrations.engines.deepspeed.prepare_arguments import (
    RULES,
    check_fit,
    check_model_and_optimizer,
)
from accel_integrations.engines.engine import EngineContext
from accel_integrations.engines.prepare_arguments import PrepareArguments
from accel_integrations.prepared.prepared import Prepared
from accel_state.gradient_state import GradientState
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.deepspeed import DeepSpeedPlugin
from accel_state.settings.handlers import Handlers
from accelerate.utils import DummyOptim, DummyScheduler

AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


def filled(
    config: dict[str, Any],
    *objects: Any,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    steps: int = 1,
    shares: int = 4,
    split_batches: bool = False,
    is_train_batch_min: bool = True,
) -> dict[str, Any]:
    plugin = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": 3}, **config}, is_train_batch_min=is_train_batch_min
    )
    gradient_state = GradientState(GradientAccumulationPlugin(num_steps=steps))
    context = EngineContext(
        SimpleNamespace(),  # type: ignore[arg-type]
        gradient_state,
        Handlers.sort(()),
        Prepared(),
        split_batches=split_batches,
    )
    fill_auto_values(plugin, context, objects, model or nn.Linear(1, 1), optimizer, scheduler, shares, shares)
    assert gradient_state.num_steps == plugin.deepspeed_config["gradient_accumulation_steps"]
    return plugin.deepspeed_config


def loader(batch_size: int | None) -> DataLoader[Any]:
    return DataLoader(range(64), batch_size=batch_size)  # type: ignore[arg-type]


def test_batch_sizes_come_from_loaders_and_what_the_configuration_accumulates_holds() -> None:
    config = filled(AUTO, loader(8), loader(2), steps=3)
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["train_batch_size"] == 2 * 3 * 4
    assert filled(AUTO, loader(8), loader(2), is_train_batch_min=False)["train_micro_batch_size_per_gpu"] == 8
    assert filled(AUTO, loader(8), split_batches=True)["train_batch_size"] == 8
    batches = DataLoader(range(64), batch_sampler=torch.utils.data.BatchSampler(range(64), 16, False))  # type: ignore[arg-type]
    assert filled(AUTO, batches)["train_micro_batch_size_per_gpu"] == 16
    assert filled({}, loader(8))["train_micro_batch_size_per_gpu"] == 8
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu: prepare a data loader"):
        filled({})
    fixed = {**AUTO, "train_micro_batch_size_per_gpu": 5}
    assert filled(fixed, loader(8))["train_batch_size"] == 20
    assert filled({**AUTO, "gradient_accumulation_steps": 2}, loader(1))["train_batch_size"] == 8
    with pytest.warns(UserWarning, match="gradient_accumulation_steps=3 of the Accelerator differs from 2"):
        filled({**AUTO, "gradient_accumulation_steps": 2}, loader(1), steps=3)


@pytest.mark.parametrize(
    "configuration",
    [
        SimpleNamespace(hidden_size=16),
        SimpleNamespace(hidden_sizes=[8, 16, 4]),
        SimpleNamespace(text_config=SimpleNamespace(hidden_size=16)),
    ],
)
def test_buckets_follow_the_width_of_the_model(configuration: Any) -> None:
    model = nn.Linear(1, 1)
    model.config = configuration
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": 3, **dict.fromkeys(keys, "auto")}
    config = filled({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}, model=model)
    assert [config["zero_optimization"][key] for key in keys] == [256, 230, 160]
    assert find_hidden_size(nn.Linear(2, 2)) is None, "it has no configuration"


def test_dummies_fill_their_sections() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    optimizer = DummyOptim(parameters, lr=0.5, weight_decay=0.25, betas=(0.5, 0.75))
    scheduler = DummyScheduler(optimizer, total_num_steps=101, warmup_num_steps=7)
    sections = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "weight_decay", "betas"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    config = filled(sections, optimizer=optimizer, scheduler=scheduler)
    assert config["optimizer"]["params"] == {"lr": 0.5, "weight_decay": 0.25, "betas": (0.5, 0.75)}
    rates = {"warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 7}
    assert config["scheduler"]["params"] == {**rates, "total_num_steps": 26}  # a step covers four processes' batches
    config = filled(sections, optimizer=optimizer, scheduler=scheduler, split_batches=True)
    assert config["scheduler"]["params"]["total_num_steps"] == 101
    config = filled(sections, optimizer=optimizer, scheduler=DummyScheduler(optimizer, total_num_steps=101))
    assert config["scheduler"]["params"]["warmup_num_steps"] == 1, "DeepSpeed refuses 0"
    assert filled({"gradient_clipping": "auto", "train_micro_batch_size_per_gpu": 1})["gradient_clipping"] == 1.0


def test_limits_of_stage_3_may_be_left_to_deepspeed() -> None:
    limits = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), "auto")
    config = filled({"zero_optimization": {"stage": 3, **limits}, "train_micro_batch_size_per_gpu": 1})
    assert config["zero_optimization"] == {"stage": 3, **dict.fromkeys(limits, 10**9)}


def test_every_value_that_nothing_fills_is_named_and_sizes_that_contradict_one_another_are_refused() -> None:
    config = {
        **AUTO,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "wall_clock_breakdown": "auto",
    }
    with pytest.raises(ValueError, match="cannot be filled") as raised:
        filled(config, scheduler=DummyScheduler(None))
    text = str(raised.value)
    for line in (
        "train_batch_size: prepare a data loader",
        "train_micro_batch_size_per_gpu: prepare a data loader",
        "optimizer.params.lr: pass it to DummyOptim",
        "scheduler.params.warmup_max_lr: pass lr to DummyOptim",
        "scheduler.params.total_num_steps: pass it to DummyScheduler",
        "zero_optimization.reduce_bucket_size: give the model a config with a hidden_size",
        "wall_clock_breakdown: write a value",
    ):
        assert line in text
    with pytest.raises(ValueError, match=r"train_micro_batch_size_per_gpu='auto'.*no batch size of its own"):
        filled(AUTO, loader(None))
    config = {**AUTO, "train_batch_size": 10, "train_micro_batch_size_per_gpu": 2}
    with pytest.raises(ValueError, match=r"train_batch_size=10.*=2 x .*=1 x 4 processes = 8"):
        filled(config)


def test_roles_of_what_is_prepared_together() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert PrepareArguments.find([loader(1), scheduler, "other", model, optimizer], RULES) == PrepareArguments(3, 4, 1)
    assert PrepareArguments.find([DummyScheduler(None), DummyOptim([]), model], RULES) == PrepareArguments(2, 1, 0)
    assert PrepareArguments.find([loader(1), scheduler], RULES).model is None
    with pytest.raises(ValueError, match=r"2 models \(Linear, Linear\).*one Accelerator for each"):
        PrepareArguments.find([model, nn.Linear(1, 1)], RULES)
    with pytest.raises(ValueError, match="optimizer SGD without its model"):
        PrepareArguments.find([optimizer, loader(1)], RULES)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "sections", "problem"),
    [
        ("real", None, ("optimizer",), "optimizer is given twice.*got a SGD.*accelerate.utils.DummyOptim"),
        ("dummy", None, (), "DummyOptim, which stands for the optimizer.*no section 'optimizer'"),
        ("real", "real", ("scheduler",), "scheduler is given twice.*DummyScheduler"),
        ("real", "dummy", (), "no section 'scheduler'.*lr_scheduler_callable"),
        ("dummy", "real", ("optimizer",), "DummyOptim together with the scheduler ConstantLR"),
        ("real", "real", (), None),
        ("real", "dummy", ("scheduler",), None),
        ("dummy", "dummy", ("optimizer", "scheduler"), None),
        ("dummy", "callable", ("optimizer",), None),
    ],
)
def test_descriptions_that_fit(
    optimizer: str, scheduler: str | None, sections: tuple[str, ...], problem: str | None
) -> None:
    real = torch.optim.SGD(nn.Linear(1, 1).parameters())
    optimizers = {"real": real, "dummy": DummyOptim([])}
    schedulers = {
        "real": torch.optim.lr_scheduler.ConstantLR(real),
        "dummy": DummyScheduler(real),
        "callable": DummyScheduler(None, lr_scheduler_callable=torch.optim.lr_scheduler.ConstantLR),
        None: None,
    }
    arguments = (optimizers[optimizer], schedulers[scheduler], dict.fromkeys(sections, {}))
    if problem is None:
        check_fit(*arguments)
    else:
        with pytest.raises(ValueError, match=problem):
            check_fit(*arguments)


def test_locks_of_builds_are_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from accel_integrations.engines.deepspeed.startup import load_library

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("cpu_adam", "something_else"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with pytest.warns(
        UserWarning, match="will wait until another process has finished a build.*cpu_adam/lock"
    ) as caught:
        load_library(torch.device("cpu"))
    assert "something_else" not in str(caught[0].message)


def test_a_model_and_its_optimizer_belong_together() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(1, 1)
    config = {"zero_optimization": {"stage": 2}}
    check_model_and_optimizer(model, torch.optim.SGD([model.weight]), config)
    check_model_and_optimizer(model, None, {**config, "optimizer": {}})
    check_model_and_optimizer(model, None, {"zero_optimization": {"stage": 3}})
    with pytest.raises(ValueError, match="model Linear without an optimizer, but ZeRO stage 2.*choose stage 3 or 0"):
        check_model_and_optimizer(model, None, config)
    with pytest.raises(ValueError, match="2 parameters of the optimizer SGD do not belong to the model Linear"):
        check_model_and_optimizer(model, torch.optim.SGD([*other.parameters(), model.weight]), config)
