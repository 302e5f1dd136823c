"""DistributedDataParallel's arguments and its communication hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_state.enums import DDPCommunicationHookType
from accel_state.settings.ddp import DistributedDataParallelKwargs
from tests.support.ranks import ranks


class Registered:
    """Stands for a DDP model and keeps what is registered."""

    def __init__(self) -> None:
        self.state: Any = None
        self.hook: Any = None

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.state, self.hook = state, hook


def register(**settings: Any) -> Registered:
    model = Registered()
    DistributedDataParallelKwargs(**settings).register_comm_hook(model)
    return model


def test_only_torch_arguments_are_passed_on() -> None:
    settings = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook=DDPCommunicationHookType.FP16)
    assert settings.to_kwargs() == {"find_unused_parameters": True}
    assert "comm_hook" not in settings.to_dict()
    assert "comm_hook" in settings.to_dict(ignore_keys=())


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("fp16", default_hooks.fp16_compress_hook),
        ("BF16", default_hooks.bf16_compress_hook),
        ("power_sgd", powerSGD_hook.powerSGD_hook),
        ("batched_power_sgd", powerSGD_hook.batched_powerSGD_hook),
        ("no", None),
    ],
)
def test_a_hook_is_registered_by_name_and_power_sgd_gets_its_state(name: str, hook: Any) -> None:
    options = {"comm_state_option": {"matrix_approximation_rank": 2}} if "power" in name else {}
    model = register(comm_hook=name, **options)
    assert model.hook is hook
    assert getattr(model.state, "matrix_approximation_rank", None) == (2 if options else None)


def test_a_wrapper_goes_around_the_hook() -> None:
    model = register(comm_hook="power_sgd", comm_wrapper="bf16")
    assert "bf16_compress_wrapper" in model.hook.__qualname__
    assert isinstance(model.state, powerSGD_hook.PowerSGDState)


def test_misspelt_hooks_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"comm_hook='powersgd'.*Did you mean 'power_sgd'\?"):
        DistributedDataParallelKwargs(comm_hook="powersgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="comm_wrapper='power_sgd' .* 'no', 'fp16', 'bf16'"):
        DistributedDataParallelKwargs(comm_hook="fp16", comm_wrapper="power_sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'matrix_rank'.*Did you mean 'matrix_approximation_rank'\?"):
        register(comm_hook="power_sgd", comm_state_option={"matrix_rank": 2})
    with pytest.raises(ValueError, match="bucket_cap_mb=0"):
        DistributedDataParallelKwargs(bucket_cap_mb=0)


def test_settings_without_effect_are_pointed_out() -> None:
    with pytest.warns(UserWarning, match="comm_state_option=.* no effect with comm_hook='fp16'"):
        DistributedDataParallelKwargs(comm_hook="fp16", comm_state_option={"warm_start": False})  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="comm_wrapper=.* no effect with comm_hook='no'"):
        DistributedDataParallelKwargs(comm_wrapper="fp16")  # type: ignore[arg-type]


@ranks(2)
def test_compressed_gradients_are_the_mean_over_ranks(rank: int, world: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 3, bias=False))
    DistributedDataParallelKwargs(comm_hook="bf16").register_comm_hook(model)  # type: ignore[arg-type]
    model(torch.full((1, 4), float(rank + 1))).sum().backward()
    weight = model.module.weight.grad
    assert weight is not None
    torch.testing.assert_close(weight, torch.full((3, 4), 1.5))
