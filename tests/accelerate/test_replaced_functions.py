"""Functions and methods that libraries put in the place of ours are the ones that run."""

from __future__ import annotations

import functools
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import accelerate.accelerator
import accelerate.big_modeling
import accelerate.hooks
import accelerate.utils.modeling
from accelerate import Accelerator, PartialState
from accelerate.compat import seams
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp2_prepare_model
from tests.support.ranks import ranks


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@ranks(2)
def test_a_library_may_allow_spread_models_and_change_how_they_are_replicated(rank: int, world: int) -> None:
    """As ms-swift does, whose models of several devices are trained by several processes."""
    original = DistributedDataParallel.__init__

    def init(self: Any, module: nn.Module, device_ids: Any, output_device: Any, *args: Any, **kwargs: Any) -> None:
        original(self, module, *args, **kwargs)

    model: Any = new_model()
    model.hf_device_map = {"0": "cpu", "2": "disk"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "verify_device_map", lambda *_: False)
        patch.setattr(DistributedDataParallel, "__init__", init)
        accelerator = Accelerator()
        assert isinstance(accelerator.prepare(model), DistributedDataParallel)


def losses_of(accelerator: Accelerator) -> list[float]:
    model: nn.Module = new_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert [type(parameter).__name__ for parameter in model.parameters()] == ["DTensor"] * 4
    losses = []
    for step in range(4):
        loss = model(torch.full((2, 4), float(step))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[1]
    accelerator.free_memory()
    return losses


@ranks(2)
def test_a_library_may_shard_models_itself(rank: int, world: int) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    calls: list[str] = []

    def wrapped(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        """As unsloth does, which corrects number formats around it."""
        calls.append(f"wrapped {type(model).__name__}")
        return fsdp2_prepare_model(accelerator, model)

    def own(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        """As axolotl does, which has adapters and quantised weights in groups of their own."""
        calls.append("own")
        mesh = accelerator.torch_device_mesh
        assert mesh is None or mesh.size() == 2
        for child in model.children():
            if isinstance(child, nn.Linear):
                fully_shard(child)
        fully_shard(model)
        return model

    def before(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare(self: Accelerator, *args: Any) -> Any:
            calls.append(f"before {len(args)}")
            return original(self, *args)

        return prepare

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    expected = losses_of(accelerator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.accelerator, "fsdp2_prepare_model", wrapped, raising=False)
        assert losses_of(accelerator) == pytest.approx(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.accelerator, "fsdp2_prepare_model", own, raising=False)
        patch.setattr(Accelerator, "_prepare_fsdp2", before(Accelerator._prepare_fsdp2))
        assert losses_of(accelerator) == pytest.approx(expected)
        model = accelerator.prepare_model(new_model())
        assert isinstance(model[0], FSDPModule)  # type: ignore[index]
    assert calls == ["wrapped Sequential", "before 2", "own", "own"]
    assert losses_of(accelerator) == pytest.approx(expected)
    assert len(calls) == 4


def add_axis_for_experts(patch: pytest.MonkeyPatch, size: int, checked: list[Any]) -> None:
    """As axolotl does: an axis "ep" along which ranks read different data and whole parameters are sharded."""
    original = ParallelismConfig.__post_init__
    names = {name: getattr(ParallelismConfig, name).fget for name in ("dp_dim_names", "dp_shard_cp_dim_names")}

    def post_init(self: Any) -> None:
        original(self)
        self.ep_size = 1
        self._sizes["ep"] = 1
        self._set_size("ep", size)

    def get_mesh(self: Any) -> Any:
        return tuple(self.active_mesh_dims), tuple(self._sizes[axis] for axis in self.active_mesh_dims)

    patch.setattr(ParallelismConfig, "__post_init__", post_init)
    patch.setattr(ParallelismConfig, "total_size", property(lambda self: math.prod(self._sizes.values())))
    for name, own in names.items():
        patch.setattr(ParallelismConfig, name, property(lambda self, own=own: ["ep", *own(self)]))
    patch.setattr(ParallelismConfig, "_get_mesh", get_mesh)
    patch.setattr(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: checked.append(accelerator))


@ranks(2)
@pytest.mark.parametrize("shards", [True, False])
def test_a_library_may_add_an_axis(rank: int, world: int, shards: bool) -> None:
    def losses(sizes: dict[str, int]) -> list[Any]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if shards else None
        accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**sizes))
        model: nn.Module = new_model()
        loader: Any = DataLoader(TensorDataset(torch.arange(32.0).view(8, 4)), batch_size=2)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seen: list[Any] = [accelerator]
        for (batch,) in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += [batch[0, 0].item(), loss.item()]
        return seen

    expected = losses({"dp_shard_size": 2} if shards else {"dp_replicate_size": 2})
    checked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        add_axis_for_experts(patch, 2, checked)
        AcceleratorState._reset_state()
        seen = losses({})
    assert checked == [seen[0]]
    assert seen[0].torch_device_mesh.mesh_dim_names == ("ep",)
    assert seen[1:] == pytest.approx(expected[1:])
    with pytest.raises(ValueError, match="'experts' is no axis"):
        ParallelismConfig()._set_size("experts", 2)


def test_a_library_may_say_that_processes_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As unsloth does on one device."""
    asked: list[Any] = []

    def prepare(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        asked.append((cpu, sagemaker_dp, backend))
        return None, DistributedType.NO

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert PartialState._prepare_backend(PartialState.__new__(PartialState), True) == (
        "gloo",
        DistributedType.MULTI_CPU,
    )
    monkeypatch.setattr(PartialState, "_prepare_backend", prepare)
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.distributed_type) == (1, 0, DistributedType.NO)
    assert asked == [(True, False, None)]


def test_a_library_may_say_that_nothing_is_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As unsloth does on one device, reading what the object itself keeps."""
    monkeypatch.setattr(
        Accelerator, "distributed_type", property(lambda self: self.__dict__["state"].distributed_type)
    )
    assert Accelerator(cpu=True).distributed_type is DistributedType.NO


@pytest.mark.parametrize("module", [accelerate.accelerator, accelerate.big_modeling, accelerate.utils.modeling])
def test_messages_can_be_turned_off_where_they_come_from(module: Any) -> None:
    assert module.logger is logging.getLogger(module.__name__)


def test_what_guards_a_spread_model_is_named() -> None:
    assert {"to", "cuda", "xpu"} <= set(accelerate.hooks._accelerate_added_attributes)


# ---- methods that subclasses override -----------------------------------------------------------------------------


@ranks(2)
def test_methods_call_what_a_subclass_overrides(rank: int, world: int) -> None:
    """As unsloth replaces `no_sync` and, while a loader is prepared, `num_processes` and `process_index`."""
    called: list[str] = []

    class Own(Accelerator):
        num_processes = property(lambda self: 1)  # type: ignore[assignment]
        process_index = property(lambda self: 0)  # type: ignore[assignment]

        @contextmanager
        def no_sync(self, model: nn.Module) -> Iterator[None]:  # type: ignore[override]
            called.append("no_sync")
            with super().no_sync(model):
                yield

        def gather(self, tensor: Any) -> Any:
            called.append("gather")
            return super().gather(tensor)

    data = TensorDataset(torch.arange(8.0).view(8, 1))
    read = {}
    for kind in (Accelerator, Own):
        accelerator = kind(cpu=True, gradient_accumulation_steps=2)
        model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(data, batch_size=2))
        read[kind] = []
        for (batch,) in loader:
            read[kind].append(batch.flatten().tolist())
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
            accelerator.gather_for_metrics(batch)
    assert read[Own] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]], "all of it, on both ranks"
    assert read[Accelerator] == [[4.0 * step + 2 * rank, 4.0 * step + 2 * rank + 1] for step in range(2)]
    assert called == ["no_sync", "gather", "gather"] * 2


@ranks(2)
def test_a_wrapped_state_dict_is_what_is_saved(rank: int, world: int, tmp_path: Path) -> None:
    original = Accelerator.get_state_dict

    @functools.wraps(original)
    def doubled(self: Accelerator, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value * 2 for name, value in original(self, *args, **kwargs).items()}

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare_model(new_model())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "get_state_dict", doubled)
        accelerator.save_model(model, tmp_path)
    accelerator.wait_for_everyone()
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value * 2) for name, value in new_model().state_dict().items())


# ---- the list of what may be replaced -----------------------------------------------------------------------------


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: f"{seam.owner}.{seam.name}")
def test_every_seam_is_there(seam: seams.Seam) -> None:
    assert hasattr(resolve_name(seam.owner), seam.name)
    assert seam.replaced_by


def test_a_function_is_looked_up_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    find = seams.late_bound("accelerate.utils.launch", "which")
    monkeypatch.setattr("accelerate.utils.launch.which", lambda name: f"/bin/{name}")
    assert find("mpirun") == "/bin/mpirun"
    monkeypatch.setattr("accelerate.utils.launch.which", lambda name: None)
    assert find("mpirun") is None


def test_what_is_no_seam_is_not_called_through_one() -> None:
    for look_up in (seams.late_bound, seams.replacement):
        with pytest.raises(KeyError, match=r"accelerate.state.PartialState is not a seam. List it"):
            look_up("accelerate.state", "PartialState")


def test_what_is_put_back_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = vars(accelerate.accelerator)
    actual = accelerate.accelerator.fsdp2_prepare_model
    monkeypatch.setitem(names, "fsdp2_prepare_model", wrapper := functools.partial(actual))
    assert seams.replacement("accelerate.accelerator", "fsdp2_prepare_model") is wrapper
    monkeypatch.setitem(names, "fsdp2_prepare_model", actual)
    assert seams.replacement("accelerate.accelerator", "fsdp2_prepare_model") is None


@ranks(4)
def test_stages_are_not_sharded_twice(rank: int, world: int) -> None:
    """A wrapper of the function that shards a model as a whole is not called for stages of a pipeline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(accelerate.accelerator), "fsdp2_prepare_model", lambda *_: pytest.fail("called"))
        accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
            parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2),
        )
        accelerator.prepare_model(new_model())


def test_nothing_is_replaced_at_first() -> None:
    assert seams.replacement("accelerate.accelerator", "fsdp2_prepare_model") is None


def test_the_packages_below_know_nothing_of_the_umbrella() -> None:
    program = (
        "import sys, torch; from accel_bigmodel import dispatch_model; m = torch.nn.Linear(1, 1); "
        "dispatch_model(m, {'': 'cpu'}, force_hooks=True); print(any(n.startswith('accelerate') for n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


@ranks(1)
def test_functions_that_nothing_calls_say_so_where_they_are_replaced(rank: int, world: int) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    for seam in seams.UNCALLED:
        module = import_module(seam.owner)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, seam.name, losses_of, raising=False)
            accelerator = Accelerator(fsdp_plugin=plugin)
            with pytest.warns(UserWarning, match=rf"{seam.name} was replaced by .*losses_of, which is not called"):
                accelerator.prepare(new_model())
        AcceleratorState._reset_state()
    Accelerator(fsdp_plugin=plugin).prepare(new_model())
