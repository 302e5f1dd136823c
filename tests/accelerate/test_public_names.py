"""Pickles name classes as accelerate 1.15 does, so that files travel between the two; alone, a package uses its own names."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
import typing
from dataclasses import is_dataclass
from importlib import import_module
from pkgutil import resolve_name, walk_packages

import pytest
import torch

import accelerate
from accel_state import public_names
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType

PACKAGES = (
    "accel_state",
    "accel_ops",
    "accel_data",
    "accel_bigmodel",
    "accel_tracking",
    "accel_integrations",
    "accel_cli",
    "accelerate.compat",
)
LOADED_BY_HAND = ("deepspeed", "xla_loader", "transformer", "torchao", "fleet", "__main__")
NEEDS_LIBRARIES = {"AORecipeKwargs", "FullyShardedDataParallelPlugin", "TorchTensorParallelPlugin"}
"""Settings whose types are those of libraries, or parts of torch, that are imported only in use."""


def known_classes() -> list[tuple[type, str]]:
    """Every class that has a public name, from all modules."""
    for package in PACKAGES:
        for module in walk_packages(import_module(package).__path__, f"{package}."):
            if not any(part in module.name for part in LOADED_BY_HAND):
                import_module(module.name)
    return public_names._known_as


def test_every_public_name_leads_to_its_class() -> None:
    known = known_classes()
    assert len(known) >= 90
    for cls, name in known:
        assert resolve_name(name) is cls
        assert f"{cls.__module__}.{cls.__qualname__}" == name


def test_annotations_still_mean_what_they_meant() -> None:
    for cls, _ in known_classes():
        if is_dataclass(cls) and cls.__name__ not in NEEDS_LIBRARIES:
            assert typing.get_type_hints(cls)
    assert typing.get_type_hints(ParallelismConfig)["tp_size"] is int


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickles_name_no_package_that_1x_lacks(protocol: int) -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    schedule = accelerator.prepare_scheduler(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
    things = [PartialState(), accelerator.state, accelerator.gradient_state, DistributedType.NO, optimizer, schedule]
    written = pickle.dumps([*things, ParallelismConfig(), accelerator.dataloader_config], protocol)
    names = {text.split(" ")[0] for _, text, _ in pickletools.genops(written) if isinstance(text, str)}
    assert {name for name in names if name.startswith("accel")} >= {"accelerate.state", "accelerate.utils.dataclasses"}
    assert not [name for name in names if name.startswith("accel_")]
    place, *_ = pickle.loads(written)
    assert place.device == accelerator.device


def test_a_copy_of_the_gradient_state_leaves_the_loaders_here() -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare_data_loader(torch.utils.data.DataLoader([1, 2])):
        copy = pickle.loads(pickle.dumps(accelerator.gradient_state))
        assert not copy.in_dataloader
        assert accelerator.gradient_state.in_dataloader


def test_an_optimizer_comes_back_where_there_is_no_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.25))
    written = pickle.dumps(optimizer)
    accelerator.state._reset_state(reset_partial_state=True)
    assert pickle.loads(written).param_groups[0]["lr"] == 0.25


ALONE = """
import pickle
from accel_state import PartialState
assert PartialState.__module__ == "accel_state.processes", PartialState.__module__
written = pickle.dumps(PartialState())
assert b"accel_state.processes" in written
import accelerate
from accel_state import DataLoaderConfiguration
assert PartialState.__module__ == "accelerate.state", "a class that was imported before the umbrella"
assert DataLoaderConfiguration.__module__ == "accelerate.utils.dataclasses", "one that was imported after it"
assert type(pickle.loads(written)) is PartialState
"""


def test_names_change_with_the_umbrella_and_not_before() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert accelerate.PartialState.__module__ == "accelerate.state"
