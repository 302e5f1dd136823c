"""Names that libraries built on this one read although they look private: one list, each used the way they use it.

What is on the list stays, as if it were public.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import accelerate
import accelerate.big_modeling
import accelerate.hooks
import accelerate.utils.modeling
from accelerate import Accelerator, PartialState, dispatch_model, load_checkpoint_and_dispatch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    AutocastKwargs,
    DistributedType,
    OffloadedWeightsLoader,
    PrefixedDataset,
    fsdp_utils,
    set_module_tensor_to_device,
)
from tests.support.ranks import ranks

OF_ACCELERATORS = [
    "_custom_objects", "_dataloaders", "_load_model_state_pre_hook", "_models", "_optimizers", "_prepare_cp",
    "_save_model_state_pre_hook", "_schedulers", "ao_recipe_handler", "autocast_handler", "clear", "dataloader_config",
    "ddp_handler", "deepspeed_config", "deepspeed_engine_wrapped", "deepspeed_ulysses_dl_adapter",
    "delayed_fp8_autocast", "device_placement", "even_batches", "flag_tensor", "fp8_enabled", "fp8_recipe_handler",
    "gradient_state", "has_fp8_handler", "has_lomo_optimizer", "init_handler", "is_fsdp2", "log_with",
    "maybe_context_parallel", "mpu", "msamp_recipe_handler", "multi_device", "native_amp",
    "optimizer_step_was_skipped", "profile_handler", "project_configuration", "rng_types", "save_iteration", "scaler",
    "scaler_handler", "should_save_model", "state", "step", "step_scheduler_with_optimizer", "te_recipe_handler",
    "torch_device_mesh", "trackers",
]  # fmt: skip
OF_STATES = [
    "_cpu", "_mixed_precision", "_reset_state", "_shared_state", "backend", "debug",
    "deepspeed_plugin", "deepspeed_plugins", "downcast_bfloat", "dynamo_plugin", "fork_launched", "fsdp_plugin",
    "initialized", "is_fsdp2", "parallelism_config", "select_deepspeed_plugin",
]  # fmt: skip
OF_GRADIENT_STATES = [
    "_add_dataloader", "_remove_dataloader", "_reset_state", "_set_sync_gradients", "_shared_state",
    "active_dataloader", "adjust_scheduler", "dataloader_references", "end_of_dataloader", "in_dataloader",
    "is_xla_gradients_synced", "num_steps", "plugin_kwargs", "remainder", "sync_gradients",
    "sync_with_dataloader",
]  # fmt: skip
OF_ALIGNING_HOOKS = [
    "buffer_original_devices", "execution_device", "input_device", "io_same_device", "offload", "offload_buffers",
    "original_devices", "param_original_devices", "place_submodules", "skip_keys", "tied_params_map",
    "tied_params_names", "tied_pointers_to_remove", "weights_map",
]  # fmt: skip
# what is asked for by `inspect.signature` before it is passed
PROBED: list[tuple[Callable[..., Any], list[str]]] = [
    (Accelerator.__init__, ["dataloader_config", "deepspeed_plugins", "fsdp_plugin", "kwargs_handlers", "log_with",
                            "parallelism_config", "project_config", "torch_tp_plugin"]),
    (Accelerator.gather_for_metrics, ["use_gather_object"]),
    (Accelerator.get_state_dict, ["unwrap"]),
    (Accelerator.unwrap_model, ["keep_fp32_wrapper", "keep_torch_compile"]),
    (accelerate.DataLoaderConfiguration.__init__, ["data_seed", "non_blocking", "use_stateful_dataloader"]),
    (dispatch_model, ["force_hooks", "main_device", "offload_buffers", "offload_index", "skip_keys"]),
    (load_checkpoint_and_dispatch, ["full_state_dict", "offload_buffers", "skip_keys", "strict"]),
    (set_module_tensor_to_device, ["clear_cache", "fp16_statistics", "non_blocking", "tied_params_map"]),
    (accelerate.hooks.AlignDevicesHook.__init__, ["execution_device", "skip_keys", "weights_map", "tied_params_map"]),
    (accelerate.skip_first_batches, ["dataloader", "num_batches"]),
]  # fmt: skip


def missing(owner: object, names: list[str]) -> list[str]:
    return [name for name in names if not hasattr(owner, name)]


def test_every_name_is_there() -> None:
    accelerator = Accelerator(cpu=True)
    assert missing(accelerator, OF_ACCELERATORS) == []
    assert missing(accelerator.state, OF_STATES) == []
    assert missing(accelerator.gradient_state, OF_GRADIENT_STATES) == []
    assert missing(accelerate.hooks.AlignDevicesHook(), OF_ALIGNING_HOOKS) == []


@pytest.mark.parametrize(("function", "names"), PROBED, ids=lambda value: getattr(value, "__qualname__", ""))
def test_what_is_probed_for_can_be_passed(function: Callable[..., Any], names: list[str]) -> None:
    assert missing_parameters(function, names) == []


def missing_parameters(function: Callable[..., Any], names: list[str]) -> list[str]:
    return [name for name in names if name not in inspect.signature(function).parameters]


class _Attention(nn.Module):
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return kwargs


def test_masks_are_dropped_by_hooks_that_programs_can_find_and_remove() -> None:
    model = nn.ModuleDict({"self_attn": _Attention(), "mlp": nn.Linear(1, 1)})
    accelerate.big_modeling._attach_context_parallel_hooks(model)
    attention, mask = model["self_attn"], torch.ones(1, 2)
    assert attention(torch.ones(1, 2), attention_mask=mask) == {"attention_mask": None, "is_causal": True}
    assert attention(torch.ones(1, 2), scale=2) == {"scale": 2}
    hooks = [
        (module, key)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if hook.__module__ == "accelerate.big_modeling"
    ]
    assert [module for module, _ in hooks] == [attention]
    for module, key in hooks:
        del module._forward_pre_hooks[key]
    assert attention(torch.ones(1, 2), attention_mask=mask) == {"attention_mask": mask}


@pytest.mark.parametrize(
    "settings", [{"layer_types": ["full_attention", "chunked_attention"]}, {"sliding_window": 4, "layer_types": None}]
)
def test_layers_that_need_their_masks_are_refused(settings: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**settings)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"layers of the types \['(chunked|sliding)_attention'\] of Linear"):
        accelerate.big_modeling._attach_context_parallel_hooks(model)


# ---- states -------------------------------------------------------------------------------------------------------


def test_libraries_ask_whether_anything_was_set_up() -> None:
    assert PartialState._shared_state == {}
    PartialState(cpu=True)
    assert PartialState._shared_state != {}
    assert PartialState().num_processes == 1
    Accelerator(cpu=True)
    AcceleratorState()._reset_state()  # on an object, as trainers do after a search
    assert AcceleratorState._shared_state == {}
    assert PartialState._shared_state != {}
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


def test_arguments_of_trainers_keep_state_objects_alive_through_a_reset() -> None:
    state = PartialState(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(AttributeError, match="_reset_state"):
        _ = state.distributed_type
    PartialState(cpu=True)
    assert state.distributed_type is DistributedType.NO  # all objects share one dictionary


def test_a_trainer_decides_when_gradients_are_synchronised() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    for last in (False, False, True):
        accelerator.gradient_state._set_sync_gradients(last)
        assert accelerator.sync_gradients is accelerator.gradient_state.sync_gradients is last
    assert accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False) is False
    GradientState._reset_state()
    assert GradientState._shared_state == {}


@ranks(2)
def test_a_trainer_that_decides_gets_averaged_gradients_only_then(rank: int, world: int) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    nn.init.constant_(accelerator.unwrap_model(model).weight, 1.0)
    batch = torch.full((1, 1), float(rank + 1), device=accelerator.device)
    accelerator.gradient_state._set_sync_gradients(False)
    with accelerator.no_sync(model):
        accelerator.backward(model(batch).sum())
    (weight,) = model.parameters()
    assert weight.grad.item() == rank + 1
    accelerator.gradient_state._set_sync_gradients(True)
    accelerator.backward(model(batch).sum())
    assert weight.grad.item() == pytest.approx(3.0)  # (1 + 1 + 2 + 2) / 2


def test_the_loader_that_is_iterated_is_known() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader([1.0, 2.0, 3.0], batch_size=2))
    state = accelerator.gradient_state
    seen = [(state.in_dataloader, state.active_dataloader is loader, state.end_of_dataloader, state.remainder)
            for _ in loader]  # fmt: skip
    assert seen == [(True, True, False, 1), (True, True, True, 1)]
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)


# ---- accelerators -------------------------------------------------------------------------------------------------


def test_trainers_ask_whether_models_were_prepared_and_hand_them_over() -> None:
    accelerator = Accelerator(cpu=True)
    assert len(accelerator._models) == 0
    model = accelerator.prepare_model(nn.Linear(1, 1))
    assert accelerator._models == [model]
    accelerator._models.clear()
    assert accelerator.prepare_model(model) is model or accelerator._models


def test_the_handler_of_autocast_can_be_read_and_overridden() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    assert accelerator.autocast_handler.enabled is False
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with accelerator.autocast(AutocastKwargs(enabled=True)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_no_scaler_where_none_is_needed() -> None:
    assert Accelerator(cpu=True).scaler is None  # trainers store its state only when there is one


def test_a_class_may_be_changed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("clip_grad_norm_", "backward", "_prepare_cp"):
        original = getattr(Accelerator, name)

        def recorded(self: Any, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Accelerator, name, recorded)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(layer := nn.Linear(1, 1), torch.optim.SGD(layer.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert calls[-2:] == ["backward", "clip_grad_norm_"]


def test_mixed_precision_may_be_asked_of_the_state() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.state._mixed_precision == accelerator.state.mixed_precision == "bf16"
    assert accelerator.native_amp is True
    assert accelerator.state._cpu is True


# ---- hooks and device maps ----------------------------------------------------------------------------------------


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()


@pytest.fixture
def spread(tmp_path: Path) -> Any:
    """A model of which the first part is in memory and the last one on disk."""
    return dispatch_model(new_model(), {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=tmp_path / "offload")


def test_the_map_of_a_model_is_kept(spread: Any) -> None:
    assert spread.hf_device_map == {"0": "cpu", "1": "cpu", "2": "disk"}
    assert "disk" in set(spread.hf_device_map.values())


def test_an_offloaded_weight_is_found_through_its_hook(spread: Any) -> None:
    """As transformers does when it saves such a model."""
    hook = spread[2]._hf_hook
    hook = hook.hooks[-1] if hasattr(hook, "hooks") else hook
    assert isinstance(hook, accelerate.hooks.AlignDevicesHook)
    assert spread[2].weight.is_meta
    assert hook.offload
    assert torch.equal(hook.weights_map["weight"], new_model()[2].weight)  # type: ignore[index]
    assert hook.original_devices == {"weight": torch.device("cpu"), "bias": torch.device("cpu")}
    assert hook.param_original_devices == hook.original_devices
    assert hook.buffer_original_devices == {}


def test_weights_on_disk_name_their_file(tmp_path: Path) -> None:
    """As peft does when it merges an adapter into them."""
    from safetensors.torch import save_file

    save_file(new_model().state_dict(), tmp_path / "model.safetensors")
    with accelerate.init_empty_weights():
        empty = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    places = {"0": "cpu", "1": "cpu", "2": "disk"}
    model: Any = load_checkpoint_and_dispatch(
        empty, str(tmp_path / "model.safetensors"), places, offload_folder=str(tmp_path / "offload")
    )
    weights = model[2]._hf_hook.weights_map
    assert isinstance(weights, PrefixedDataset)
    assert weights.prefix == "2."
    assert isinstance(weights.dataset, OffloadedWeightsLoader)
    assert "2.weight" in dict(weights.dataset)
    assert weights.dataset.index["2.weight"]["safetensors_file"] == str(tmp_path / "model.safetensors")


def test_a_hook_is_run_by_hand(spread: Any) -> None:
    """As modules do that use a child's weight without calling it."""
    child = spread[2]
    hook = child._hf_hook
    hook.pre_forward(child)
    assert torch.equal(child.weight, new_model()[2].weight)  # type: ignore[index]
    hook.post_forward(child, torch.tensor([]))
    assert child.weight.is_meta


def test_a_hook_is_made_again_from_its_attributes(spread: Any) -> None:
    """As transformers, peft and diffusers do when they replace a layer."""
    old = spread[2]._hf_hook
    kind = getattr(accelerate.hooks, type(old).__name__)
    names = inspect.signature(kind.__init__).parameters
    new = kind(**{name: value for name, value in old.__dict__.items() if name in names})
    replacement = nn.Linear(4, 4)
    replacement.load_state_dict({name: old.weights_map[name] for name in ("weight", "bias")})
    expected = spread(torch.ones(2, 4))
    accelerate.hooks.remove_hook_from_module(spread[2])
    accelerate.hooks.add_hook_to_module(replacement, new)
    spread[2] = replacement
    assert replacement._hf_hook is new
    assert torch.equal(spread(torch.ones(2, 4)), expected)


def test_generation_changes_where_outputs_go(spread: Any) -> None:
    spread._hf_hook.io_same_device = False
    assert spread._hf_hook.io_same_device is False
    assert [part._hf_hook.execution_device for part in (spread[0], spread[2])] != [None, None]


def test_what_was_before_hooks_is_kept() -> None:
    layer: Any = nn.Linear(2, 2)
    original = layer.forward
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    assert layer._old_forward == original
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook(), append=True)
    assert len(layer._hf_hook.hooks) == 2
    accelerate.hooks.remove_hook_from_module(layer)
    assert not hasattr(layer, "_hf_hook")
    assert not hasattr(layer, "_old_forward")


def test_states_can_be_asked_whether_they_allow_other_settings() -> None:
    """As the states of optimum-neuron do, which are subclasses."""
    state = Accelerator(cpu=True).state
    for same in ({}, {"mixed_precision": "no"}, {"cpu": True}, {"mixed_precision": None, "cpu": False}):
        state._check_initialized(**same)
    with pytest.raises(ValueError, match="mixed_precision='bf16' contradicts mixed_precision='no'"):
        state._check_initialized("bf16")


def test_windows_of_other_libraries_are_counted_by_ours() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    seen = []
    for _ in range(4):
        accelerator._do_sync()
        seen.append((accelerator.step, accelerator.sync_gradients))
    assert seen == [(1, False), (2, True), (3, False), (4, True)]


def test_states_of_models_are_read_and_loaded_by_private_functions() -> None:
    """As unsloth does, also of adapters only."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    source, target = new_model(), new_model()
    for options in (None, StateDictOptions(full_state_dict=True)):
        with torch.no_grad():
            source[0].weight.add_(1)
        state = fsdp_utils._get_model_state_dict(source, sd_options=options)
        assert list(state) == list(source.state_dict())
        result = fsdp_utils._set_model_state_dict(target, state, adapter_only=True, sd_options=options)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert torch.equal(target[0].weight, source[0].weight)


def test_states_of_adapters_are_read_and_loaded_by_private_functions() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)
    source, target = peft.get_peft_model(new_model(), config), peft.get_peft_model(new_model(), config)
    state = fsdp_utils._get_model_state_dict(source, adapter_only=True)
    assert len(state) == 2
    fsdp_utils._set_model_state_dict(target, state, adapter_only=True)
    loaded = fsdp_utils._get_model_state_dict(target, adapter_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", torch.float16])
def test_dtypes_are_found_by_name(dtype: Any) -> None:
    assert accelerate.utils.modeling._get_proper_dtype(dtype) is torch.float16


def test_pipelines_chain_models_by_their_hooks() -> None:
    first, hook = accelerate.cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, after = accelerate.cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    assert hook.model is first
    assert hook.hook is first._hf_hook
    assert isinstance(first._hf_hook, accelerate.hooks.CpuOffload)
    assert second._hf_hook.prev_module_hook is hook
    assert torch.device(after.hook.execution_device) == torch.device("cpu")
    hook.hook.offload_strategy = object()  # a library's own, on the hook
    hook.offload()
    hook.remove()
    assert not hasattr(first, "_hf_hook")


def test_the_check_of_device_maps_is_looked_up_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_check(*_: Any) -> None:
        """What transformers puts there for models with parts that are not to be placed."""

    with pytest.raises(ValueError, match="no device"):
        dispatch_model(new_model(), {"0": "cpu"})
    monkeypatch.setattr(accelerate.big_modeling, "check_device_map", no_check)
    assert dispatch_model(new_model(), {"0": "cpu"}).hf_device_map == {"0": "cpu"}
