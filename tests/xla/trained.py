"""Run by `test_training.py` in a process of its own, whose number of devices is fixed: trains, and writes what it saw.

    trained.py RESULTS FOLDER [OTHER_FOLDER]

The results are JSON; into FOLDER a checkpoint is saved, and OTHER_FOLDER is one that a process with other devices has saved.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from accelerate import Accelerator
from accelerate.data_loader import MpDeviceLoaderWrapper
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    broadcast,
    reduce,
    set_seed,
)
from tests.xla.problem import (
    ACCUMULATION,
    EPOCHS,
    GLOBAL_BATCH,
    MAX_NORM,
    Net,
    dataset,
    loss_of,
    optimizer_of,
)

IS_SPMD = xr.is_spmd()
NUM_DEVICES = xr.global_runtime_device_count() if IS_SPMD else 1
BATCH = GLOBAL_BATCH // NUM_DEVICES


def accelerator_of(sharded: bool = False, **settings: Any) -> Accelerator:
    """A new accelerator, as at the start of a program."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if sharded:
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    return Accelerator(**settings)


def num_compiled() -> int:
    actual = metrics.metric_data("CompileTime")
    return int(actual[0]) if actual else 0


def spec_of(tensor: torch.Tensor) -> str:
    spec: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return spec


class Run:
    """A training run, which can be stopped and continued."""

    def __init__(
        self, sharded: bool = False, accumulation: int = ACCUMULATION, splits: bool = False, **settings: Any
    ) -> None:
        loading = DataLoaderConfiguration(split_batches=splits)
        self.accelerator = accelerator_of(
            sharded, gradient_accumulation_steps=accumulation, dataloader_config=loading, **settings
        )
        model = Net()
        optimizer = optimizer_of(model)
        gamma = 0.9 if splits else 0.9 ** (1 / NUM_DEVICES)  # which it is stepped by for every device
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=gamma)
        loader = DataLoader(dataset(), batch_size=GLOBAL_BATCH if splits else BATCH)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.compiled: list[int] = []
        self.synced: list[bool] = []

    def epoch(self, loader: Any = None) -> list[float]:
        losses = []
        for inputs, targets in self.loader if loader is None else loader:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, inputs, targets)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
            self.synced.append(self.accelerator.sync_gradients)
            self.compiled.append(num_compiled())
        return [loss.item() for loss in losses]

    def train(self) -> list[float]:
        return [loss for _ in range(EPOCHS) for loss in self.epoch()]


# ---- what is tried ----------------------------------------------------------------------------------------------


def trained(sharded: bool = False, **settings: Any) -> dict[str, Any]:
    run = Run(sharded, **settings)
    losses = run.train()
    state = run.optimizer.state[
        run.model.get_parameter("embed.weight" if not sharded else "_orig_module.embed.weight")
    ]
    return {
        "losses": losses,
        "synced": run.synced,
        "compiled": run.compiled,
        "specs": {name.removeprefix("_orig_module."): spec_of(one) for name, one in run.model.named_parameters()},
        "moment": spec_of(state["exp_avg"]),
        "dtypes": sorted({str(one.dtype) for one in run.model.parameters()}),
        "class": type(run.model).__name__,
        "unwrapped": type(run.accelerator.unwrap_model(run.model)).__name__,
        "tied": run.accelerator.unwrap_model(run.model).first.weight is run.accelerator.unwrap_model(run.model).second.weight,
    }  # fmt: skip


def sharded() -> dict[str, Any]:
    return trained(sharded=True)


def every_batch_a_step() -> dict[str, Any]:
    return trained(accumulation=1)


def in_bf16() -> dict[str, Any]:
    return trained(mixed_precision="bf16")


def sharded_in_bf16() -> dict[str, Any]:
    return trained(sharded=True, mixed_precision="bf16")


def loaders() -> dict[str, Any]:
    accelerator = accelerator_of()
    plain = DataLoader(dataset(), batch_size=BATCH)
    loader = accelerator.prepare(plain)
    seen, kept, specs = [], [], set()
    for inputs, _ in loader:
        seen.append(len(inputs))
        specs.add(spec_of(inputs))
        kept.append(accelerator.gather_for_metrics(inputs).cpu())
    rest = accelerator.skip_first_batches(loader, 2)
    given: dict[str, Any] = {"input_sharding": None}
    loader._parallel_loader_kwargs = given
    loader.set_epoch(3)
    split = accelerator_of(dataloader_config=DataLoaderConfiguration(split_batches=True)).prepare(
        DataLoader(dataset(), batch_size=GLOBAL_BATCH)
    )

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(dataset().tensors[0])

    accelerator = accelerator_of()
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=BATCH))
    streamed = [(len(batch), accelerator.gather_for_metrics(batch).cpu()) for batch in stream]
    shuffled = accelerator_of(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    ).prepare(DataLoader(dataset(), batch_size=BATCH, shuffle=True))
    orders = [torch.cat([inputs[:, 0].cpu() for inputs, _ in shuffled]).tolist() for _ in range(2)]
    return {
        "sizes": seen,
        "specs": sorted(specs),
        "all in order": torch.equal(torch.cat(kept), dataset().tensors[0]),
        "length": len(loader),
        "is MpDeviceLoader": isinstance(loader, MpDeviceLoader),
        "total_batch_size": loader.total_batch_size,
        "total_dataset_length": loader.total_dataset_length,
        "device": str(loader.device),
        "wraps": type(loader.dataloader).__name__,
        "epoch": loader.iteration,
        "rest": [len(inputs) for inputs, _ in rest],
        "rest wraps": type(rest).__name__,
        "split": [len(inputs) for inputs, _ in split],
        "streamed": [size for size, _ in streamed],
        "stream in order": torch.equal(torch.cat([batch for _, batch in streamed]), dataset().tensors[0]),
        "orders differ": orders[0] != orders[1],
        "all of them": [len(set(order)) for order in orders],
    }


def operations() -> dict[str, Any]:
    accelerator = accelerator_of()
    tensor = torch.arange(6.0, device=accelerator.device).view(3, 2)
    accelerator.wait_for_everyone()
    accelerator.set_trigger()
    return {
        "gather": accelerator.gather(tensor).cpu().tolist(),
        "reduce": reduce(tensor, "mean").cpu().tolist(),
        "broadcast": broadcast({"a": tensor})["a"].cpu().tolist(),
        "pad": accelerator.pad_across_processes(tensor).cpu().tolist(),
        "objects": accelerator.gather_for_metrics(["a", "b"]),
        "trigger": accelerator.check_trigger(),
        "processes": accelerator.num_processes,
        "type": accelerator.distributed_type.value,
        "engine": accelerator.engine.name,
    }


def random_numbers(folder: Path) -> dict[str, Any]:
    def draw() -> list[float]:
        drawn: list[float] = torch.rand(4, device="xla").cpu().tolist()
        return drawn

    accelerator = accelerator_of()
    set_seed(3)
    first, second = draw(), draw()
    set_seed(3)
    again = draw()
    accelerator.save_state(str(folder / "random"))
    after = draw()
    set_seed(9)
    draw()
    accelerator.load_state(str(folder / "random"))
    return {"first": first, "second": second, "again": again, "after": after, "restored": draw()}


def saved(folder: Path) -> dict[str, Any]:
    """Save after an epoch, train another."""
    run = Run(sharded=IS_SPMD, splits=True)
    run.epoch()
    run.accelerator.save_state(str(folder / "state"))
    run.accelerator.save_model(run.model, str(folder / "model"))
    full = run.accelerator.get_state_dict(run.model)
    before = num_compiled()
    return {
        "losses": run.epoch(),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        "names": sorted(full),
        "devices": sorted({str(value.device) for value in full.values()}),
        "compiled anew": num_compiled() - before,
    }


def loaded(folder: Path) -> dict[str, Any]:
    """Continue from a checkpoint, perhaps of another number of devices."""
    run = Run(sharded=IS_SPMD, splits=True)
    before = {name: spec_of(one) for name, one in run.model.named_parameters()}
    run.accelerator.load_state(str(folder / "state"))
    after = {name: spec_of(one) for name, one in run.model.named_parameters()}
    moments = {spec_of(state["exp_avg"]) for state in run.optimizer.state.values() if state["exp_avg"].ndim == 2}
    return {"losses": run.epoch(), "same specs": before == after, "moments": sorted(moments)}


def resumed_in_a_window(folder: Path) -> dict[str, Any]:
    """Save between the two micro-batches of a window, and continue there."""
    run = Run(sharded=IS_SPMD, splits=True)
    kept, losses = folder / "window", []
    for index, (inputs, targets) in enumerate(run.loader):
        losses += run.epoch([(inputs, targets)])
        if index == 2:
            run.accelerator.save_state(str(kept))
    again = Run(sharded=IS_SPMD, splits=True)
    again.accelerator.load_state(str(kept))
    rest = again.accelerator.skip_first_batches(again.loader, 3)
    return {"losses": losses[3:], "resumed": again.epoch(rest), "synced": again.synced}


def without_loader() -> dict[str, Any]:
    """A program whose batches come from elsewhere."""
    run = Run(accumulation=1)
    (inputs, targets), losses = dataset().tensors, []
    started = metrics.metric_data("TensorsGraphSize")
    for _ in range(4):
        loss = loss_of(run.model, inputs[:8].to(run.accelerator.device), targets[:8].to(run.accelerator.device))
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.detach())
    ran = metrics.metric_data("TensorsGraphSize")[0] - (started[0] if started else 0)
    return {"ran": ran, "losses": [loss.item() for loss in losses]}


def refused() -> dict[str, str]:
    """What cannot be done, by what is said."""
    actual: dict[str, str] = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            actual[name] = f"{type(error).__name__}: {error}"

    def on_mesh_without_fsdp() -> None:
        import torch_xla.distributed.spmd as xs

        xs.set_global_mesh(xs.Mesh(list(range(NUM_DEVICES)), (NUM_DEVICES,), ("model",)))
        try:
            accelerator_of(sharded=True).prepare(Net())
        finally:
            xs.xla_sharding._GLOBAL_MESH = None

    from accelerate.utils import DeepSpeedPlugin, ParallelismConfig, TorchTensorParallelPlugin

    plugin = FullyShardedDataParallelPlugin
    attempt("fp16", lambda: accelerator_of(mixed_precision="fp16"))
    attempt("fsdp1", lambda: accelerator_of(fsdp_plugin=plugin(fsdp_version=1)))
    attempt("fsdp2", lambda: accelerator_of(fsdp_plugin=plugin(fsdp_version=2)))
    attempt("offload", lambda: accelerator_of(fsdp_plugin=plugin(fsdp_version=2, cpu_offload=True)))
    attempt("deepspeed", lambda: accelerator_of(deepspeed_plugin=DeepSpeedPlugin()))
    attempt("tp", lambda: accelerator_of(torch_tp_plugin=TorchTensorParallelPlugin()))
    attempt("mesh", lambda: accelerator_of(parallelism_config=ParallelismConfig(tp_size=2)))
    if IS_SPMD:
        attempt("axes", on_mesh_without_fsdp)
        attempt(
            "split",
            lambda: accelerator_of(dataloader_config=DataLoaderConfiguration(split_batches=True)).prepare(
                DataLoader(dataset(), batch_size=NUM_DEVICES + 1)
            ),
        )
    else:
        accelerator = accelerator_of()
        xr.use_spmd()
        attempt("late", lambda: accelerator.prepare(nn.Linear(2, 2)))
    return actual


def main(results: str, folder: str, other: str = "") -> None:
    seen: dict[str, Any] = {"trained": trained(), "every_batch_a_step": every_batch_a_step(), "bf16": in_bf16()}
    if IS_SPMD:
        seen |= {"sharded": sharded(), "sharded bf16": sharded_in_bf16()}
    seen |= {"loaders": loaders(), "operations": operations(), "random": random_numbers(Path(folder))}
    seen |= {"saved": saved(Path(folder)), "without loader": without_loader()}
    seen["loaded"] = loaded(Path(folder))
    seen["window"] = resumed_in_a_window(Path(folder))
    wrapper = pickle.loads(pickle.dumps(Run().loader))
    seen["pickled"] = [type(wrapper).__name__, isinstance(wrapper, MpDeviceLoaderWrapper), len(wrapper)]
    if other:
        seen["loaded other"] = loaded(Path(other))
    seen["refused"] = refused()  # last: it may choose SPMD
    Path(results).write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
