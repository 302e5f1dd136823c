"""Hooks around the forward pass."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import fx, nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accel_bigmodel.hooks.cast import attach_layerwise_casting_hooks
from accel_bigmodel.hooks.hook import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_bigmodel.hooks.user_offload import cpu_offload_with_hook


class Shift(ModelHook):
    """Adds something before and after."""

    def __init__(self, before: float = 0, after: float = 0, no_grad: bool = False) -> None:
        self.before, self.after, self.no_grad = before, after, no_grad
        self.log: list[str] = []

    def init_hook(self, module: Any) -> Any:
        self.log.append("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + self.after

    def detach_hook(self, module: Any) -> Any:
        self.log.append("detach")
        return module


class Scale(nn.Module):
    def forward(self, inputs: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return inputs * factor


def test_hooks_run_around_forward_and_leave_no_trace() -> None:
    module, hook = Scale(), Shift(before=1, after=10)
    assert add_hook_to_module(module, hook) is module
    assert module(torch.ones(1)).item() == 14
    assert module(torch.ones(1), factor=3).item() == 16
    assert list(inspect.signature(module.forward).parameters) == ["inputs", "factor"]
    assert module._hf_hook is hook
    assert module._old_forward(torch.ones(1)).item() == 2
    remove_hook_from_module(module)
    assert module(torch.ones(1)).item() == 2
    assert hook.log == ["init", "detach"]
    assert not {"forward", "_hf_hook", "_old_forward"} & set(vars(module))
    remove_hook_from_submodules(nn.Sequential(module))


def test_hooks_replace_one_another_or_follow_and_can_switch_gradients_off() -> None:
    module = Scale()
    add_hook_to_module(module, Shift(before=100))
    add_hook_to_module(module, Shift(before=1))
    assert module(torch.ones(1)).item() == 4
    add_hook_to_module(module, Shift(before=2, after=5), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert module(torch.ones(1)).item() == (1 + 1 + 2) * 2 + 5
    remove_hook_from_module(module)
    assert module(torch.ones(1)).item() == 2
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, Shift(no_grad=True))
    assert not layer(torch.ones(1, 2)).requires_grad
    add_hook_to_module(layer, Shift(), append=True)
    assert not layer(torch.ones(1, 2)).requires_grad


def test_a_forward_of_its_own_and_traced_modules_come_back() -> None:
    module = Scale()
    own = lambda inputs: inputs * 7  # noqa: E731
    module.forward = own  # type: ignore[method-assign, assignment]
    add_hook_to_module(module, Shift(after=1))
    assert module(torch.ones(1)).item() == 8
    remove_hook_from_module(module)
    assert module.forward is own
    traced = fx.symbolic_trace(Scale())
    add_hook_to_module(traced, Shift(after=1))
    assert traced(torch.ones(1), 2.0).item() == 3
    remove_hook_from_module(traced)
    assert traced(torch.ones(1), 2.0).item() == 2


# ---- weights that come and go -----------------------------------------------------------------------------------


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()


def test_weights_are_there_only_while_a_module_runs() -> None:
    model, inputs = new_model(), torch.randn(3, 4, requires_grad=True)
    expected = model(inputs)
    (gradient,) = torch.autograd.grad(expected.sum(), inputs)
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    assert torch.equal(torch.autograd.grad(model(inputs).sum(), inputs)[0], gradient), "it flows through what has gone"
    seen: list[str] = []
    model[2][0].register_forward_hook(lambda module, *_: seen.append(module.weight.device.type))  # type: ignore[index]
    for _ in range(2):
        assert torch.equal(model(inputs), expected)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())
    assert seen == ["meta", "meta"], "hooks of torch run after ours have put weights away"
    copied = copy.deepcopy(model)
    assert torch.equal(copied(inputs), expected)
    assert all(parameter.is_meta for parameter in model.parameters())
    remove_hook_from_submodules(model)
    assert torch.equal(model(inputs), expected)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_buffers_go_too_if_wanted_except_those_of_no_checkpoint() -> None:
    model, inputs = new_model(), torch.randn(3, 4)
    model[1].register_buffer("mask", torch.ones(2), persistent=False)
    expected = model(inputs)
    attach_align_device_hook(model, execution_device="cpu", offload=True, offload_buffers=True)
    assert {name: buffer.is_meta for name, buffer in model.named_buffers()}["1.running_mean"]
    assert not model[1].mask.is_meta
    assert torch.equal(model(inputs), expected)


def test_weights_that_are_replaced_in_the_map_are_used() -> None:
    layer = nn.Linear(2, 2, bias=False)
    weights = {"weight": torch.eye(2)}
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert layer(torch.ones(1, 2)).tolist() == [[1, 1]]
    weights["weight"] = 3 * torch.eye(2)
    assert layer(torch.ones(1, 2)).tolist() == [[3, 3]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_come_also_where_the_start_of_a_hook_was_left_out(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    layer = nn.Linear(2, 2, bias=False, device=device)
    hook = AlignDevicesHook("cpu", offload=True, weights_map={"weight": 3 * torch.eye(2)})
    with monkeypatch.context() as patch:  # as compressed-tensors does, whose weights are in place already
        patch.setattr(AlignDevicesHook, "init_hook", lambda self, module: module)
        add_hook_to_module(layer, hook)
    for _ in range(2):
        assert layer(torch.ones(1, 2)).tolist() == [[3, 3]]
        assert layer.weight.is_meta


def test_modules_that_use_the_weights_of_others_get_them_at_once() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs @ self.inner.weight

    model = nn.Sequential(Direct())
    expected = model(torch.ones(1, 2))
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=["Direct"])
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert not hasattr(model[0].inner, "_hf_hook")
    model = nn.Sequential(Direct())
    attach_align_device_hook(model, "cpu", preload_module_classes=["Direct"])
    assert not hasattr(model[0], "_hf_hook"), "nothing is loaded, so nothing is loaded at once"
    assert hasattr(model[0].inner, "_hf_hook")


def test_inputs_and_outputs_travel() -> None:
    class Meta(nn.Module):
        def forward(self, inputs: torch.Tensor, mask: Any = None, cache: Any = None) -> Any:
            return inputs.device.type, mask.device.type, cache.device.type, inputs

    module = Meta()
    add_hook_to_module(module, AlignDevicesHook("meta", skip_keys="cache"))
    *devices, output = module(torch.ones(1), mask=torch.ones(1), cache=torch.ones(1))
    assert devices == ["meta", "meta", "cpu"]
    assert output.is_meta
    layer = nn.Linear(2, 2)
    attach_align_device_hook_on_blocks(layer, "meta")
    assert layer.weight.is_meta
    assert layer._hf_hook.io_same_device
    assert "execution_device='meta'" in repr(layer._hf_hook)


def test_only_modules_with_weights_are_hooked_for_their_device() -> None:
    model = new_model()
    attach_execution_device_hook(model, "cpu", preload_module_classes=["Sequential"])
    assert [name for name, part in model.named_modules() if hasattr(part, "_hf_hook")] == [""]
    model = new_model()
    attach_execution_device_hook(model, "cpu")
    hooked = [name for name, part in model.named_modules() if hasattr(part, "_hf_hook")]
    assert hooked == ["", "0", "1", "2", "2.0"]


# ---- other hooks ------------------------------------------------------------------------------------------------


def test_layers_are_stored_in_another_format() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Sequential(nn.Linear(2, 2)), nn.Bilinear(2, 2, 2))
    model.append(nn.Linear(2, 2))
    attach_layerwise_casting_hooks(
        model, torch.float16, torch.float32, skip_modules_pattern=r"^4$", skip_modules_classes=(nn.Bilinear,)
    )
    dtypes = [part.weight.dtype for part in (model[0], model[1], model[2][0], model[3], model[4])]  # type: ignore[index]
    assert dtypes == [torch.float16, torch.float32, torch.float16, torch.float32, torch.float32]
    assert model[0](torch.ones(1, 2)).dtype == torch.float32
    assert model[0].weight.dtype == torch.float16


def test_models_take_turns() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    moves: list[tuple[str, str]] = []
    for name, model in (("first", first), ("second", second)):
        plain = model.to
        model.to = lambda device, name=name, plain=plain: moves.append((name, str(device))) or plain(device)  # type: ignore[method-assign, misc, assignment]
    first, hook = cpu_offload_with_hook(first, "cpu")  # type: ignore[assignment]
    second, last = cpu_offload_with_hook(second, "cpu", prev_module_hook=hook)  # type: ignore[assignment]
    assert moves == [("first", "cpu"), ("second", "cpu")]
    second(first(torch.ones(1, 2)))
    last.offload()
    assert moves[2:] == [("first", "cpu"), ("second", "cpu"), ("second", "cpu")]
    for one in (hook, last):
        one.remove()
    assert not hasattr(first, "_hf_hook")
