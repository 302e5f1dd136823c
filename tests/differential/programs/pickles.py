"""Objects that programs keep in files of their own: `save FOLDER` writes them, `load FOLDER` says what has come back."""

from __future__ import annotations

import pickle
import sys
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from record import done, record
from torch.utils.data import BatchSampler, SequentialSampler

from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler, SkipBatchSampler
from accelerate.hooks import AlignDevicesHook, LayerwiseCastingHook
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    OffloadedWeightsLoader,
    PrefixedDataset,
    ProjectConfiguration,
    TensorInformation,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    find_device,
)
from accelerate.utils import dataclasses as all_names

ENUMS = [
    "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType", "DynamoBackend", "FP8BackendType",
    "LoggerType", "PrecisionType", "RNGType", "SageMakerDistributedType",
]  # fmt: skip
NEW = {  # settings that 1.15 does not have
    "average_over", "exit_code_after_signal", "expert_parallel", "plan", "pp_handler", "pp_size", "save_on_signals",
}  # fmt: skip
OF_STATES = [
    "backend", "debug", "device", "distributed_type", "fork_launched", "local_process_index", "num_processes",
    "process_index", "use_distributed", "is_main_process", "is_last_process",
]  # fmt: skip


def things(folder: Path) -> dict[str, Any]:
    """What is written, by name."""
    arguments = training_arguments(folder) if find_spec("transformers") else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(2, 2)
    batches = BatchSampler(SequentialSampler(range(10)), 2, False)
    weights = {"layer.weight": torch.arange(4.0), "layer.bias": torch.ones(2)}
    optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.5))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer, factor=0.5)
    return {
        "place": PartialState(),
        "state": accelerator.state,
        "gradients": accelerator.gradient_state,
        "optimizer": optimizer,
        "scheduler": accelerator.prepare_scheduler(schedule),
        "parallel": ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig()),
        "autocast": AutocastKwargs(enabled=False),
        "loading": DataLoaderConfiguration(even_batches=False, use_seedable_sampler=True),
        "ddp": DistributedDataParallelKwargs(bucket_cap_mb=3),
        "accumulation": GradientAccumulationPlugin(num_steps=4, sync_each_batch=True),
        "scaling": GradScalerKwargs(init_scale=8.0),
        "group": InitProcessGroupKwargs(backend="gloo"),
        "project": ProjectConfiguration(project_dir=str(folder), total_limit=2),
        "compile": TorchDynamoPlugin(backend="EAGER", dynamic=True),
        "shape": TensorInformation(shape=torch.Size([2]), dtype=torch.float32),
        "batches": BatchSamplerShard(batches, 2, 1),
        "later batches": SkipBatchSampler(batches, skip_batches=2),
        "samples": IterableDatasetShard(range(7), batch_size=2, num_processes=2, process_index=1),  # type: ignore[arg-type]
        "shuffled": SeedableRandomSampler(range(9), data_seed=3),
        "weights": OffloadedWeightsLoader(state_dict=weights),
        "part": PrefixedDataset(weights, "layer."),
        "hook": AlignDevicesHook(execution_device="cpu", io_same_device=True),
        "casting": LayerwiseCastingHook(torch.float16, torch.float32, non_blocking=False),
        **arguments,
        **{f"{name}.{member.name}": member for name in ENUMS for member in getattr(all_names, name)},
    }


def training_arguments(folder: Path) -> dict[str, Any]:
    """What transformers' Trainer saves beside every model, with the process's place inside."""
    from transformers import TrainingArguments

    given = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], learning_rate=0.5)
    return {"training arguments": given}  # they start the state anew


def loaded(path: Path) -> Any:
    """What is in a file."""
    if path.suffix == ".pickle":
        return pickle.loads(path.read_bytes())
    return torch.load(path, weights_only=False)  # noqa: TID251 - as programs do


def seen_in(thing: Any) -> Any:
    """What a program reads of a thing that has come back."""
    if isinstance(thing, Enum | str):
        return repr(thing)
    if isinstance(thing, torch.Tensor):
        return thing.tolist()
    if is_dataclass(thing) and not hasattr(thing, "output_dir"):
        return {
            row.name: seen_in(getattr(thing, row.name)) for row in fields(thing) if row.init and row.name not in NEW
        }
    if hasattr(thing, "distributed_type"):
        return {name: str(getattr(thing, name)) for name in OF_STATES} | {
            "precision": getattr(thing, "mixed_precision", "")
        }
    if hasattr(thing, "sync_gradients"):
        return [thing.sync_gradients, thing.num_steps, thing.plugin_kwargs]
    if hasattr(thing, "get_last_lr"):
        return [thing.get_last_lr(), thing.state_dict()["factor"]]
    if hasattr(thing, "zero_grad"):
        return [thing.param_groups[0]["lr"], thing.state_dict()["param_groups"][0]["betas"]]
    if hasattr(thing, "learning_rate"):
        return [thing.learning_rate, thing.output_dir, seen_in(thing.distributed_state), str(thing.device)]
    if isinstance(thing, PrefixedDataset):
        return thing["weight"].tolist()
    if hasattr(thing, "keys"):
        return {name: thing[name].tolist() for name in thing}
    if hasattr(thing, "pre_forward"):
        moved = thing.pre_forward(torch.nn.Identity(), torch.ones(1))
        return [str(find_device(moved[0])), str(getattr(thing, "execution_device", None))]
    return list(thing) if hasattr(thing, "__iter__") else repr(thing)


folder = Path(sys.argv[2])
if sys.argv[1] == "save":
    record("written", lambda: None)
    for name, thing in things(folder).items():
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(thing))
        torch.save(thing, folder / f"{name}.pt")
else:
    for path in sorted(folder.iterdir()):
        record(path.name, lambda path=path: seen_in(loaded(path)))
done()
