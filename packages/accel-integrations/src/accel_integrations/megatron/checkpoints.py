"""Weights in checkpoints of Megatron-LM itself: its formats `torch` (`mp_rank_*`) and `torch_dist` are read, the latter written.

In both, parameters have megatron-core's names. `torch` has a file for each rank of a replica, with its shards, whose layers are
numbered from 0 in each chunk. `torch_dist` has full tensors in the format of `torch.distributed.checkpoint`, in which a parameter of
all layers (and of all experts) is one tensor. Nothing in these files is executed when they are read.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_integrations.megatron.chunks import EXPERT, LAYER
from accel_integrations.megatron.core import load, on_device
from accel_integrations.megatron.groups import raise_on_all_ranks
from accel_integrations.megatron.weights.layouts import REPLICATED, Vocabulary, Weight
from accel_ops.files.durable import DurableFile, write_atomically
from accel_ops.files.serialization import load as load_file
from accel_ops.files.serialization import serialize
from accel_ops.files.staging import StagedFolder

if TYPE_CHECKING:
    from accel_integrations.megatron.chunks import Chunks
    from accel_integrations.megatron.weights.sharded import ShardedWeights

LATEST = "latest_checkpointed_iteration.txt"
RANK_FILE, CHECKPOINT_VERSION = "model_optim_rng.pt", 3.0
RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Norms, and their names where Transformer Engine computes them together with what follows, as `torch_dist` always names them."""
OF_MODEL = ("embedding.", "decoder.", "encoder.", "output_layer.", "lm_head.", "pooler.", "binary_head.")
"""With what names of a model's parameters begin; a folder may also have those of optimizers."""

Stored = Iterator[tuple[str, Callable[[], Tensor]]]
"""Parameters by megatron-core's names, layers numbered as in the full model, each with a function that reads it."""


def load_weights(folder: str | os.PathLike[str], weights: ShardedWeights) -> int:
    """Load the weights of a checkpoint of Megatron-LM, whatever the degrees with which it was saved; all ranks call this.

    Args:
        folder: The folder of the run, of which the latest iteration is read, or that of an iteration (`iter_*`).
        weights: The weights of the prepared model; unchanged when an error is raised.

    Returns:
        The iteration.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It is damaged, or of a model of other parameters or sizes.
    """
    shards: dict[str, Tensor] = {}
    iteration, error = 0, None
    try:
        path, iteration = _find_iteration(Path(folder))
        shards = _read_shards(path, weights)
    except Exception as problem:
        error = problem
    raise_on_all_ranks(error)
    for name, shard in shards.items():
        weights.held[name].assign(shard)
    return iteration


def _find_iteration(folder: Path) -> tuple[Path, int]:
    """The folder of an iteration, and its number; 0 for a release."""
    if (folder / LATEST).is_file():
        latest = (folder / LATEST).read_text().strip()
        if not latest.isdigit() and latest != "release":
            raise ValueError(
                f"{folder / LATEST} has {latest!r}, not the number of an iteration. Pass the folder of one, iter_*."
            )
        folder /= f"iter_{int(latest):07d}" if latest.isdigit() else latest
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. Pass that of a checkpoint of Megatron-LM.")
    number = folder.name.removeprefix("iter_")
    return folder, int(number) if number.isdigit() else 0


def _read_shards(folder: Path, weights: ShardedWeights) -> dict[str, Tensor]:
    """This rank's shards, by the name of the parameter."""
    first = {weight.sources: weight.name for weight in reversed(weights.listed)}  # tied ones are stored once
    holders: dict[str, list[str]] = {}
    for name, held_weight in weights.held.items():
        holders.setdefault(first[held_weight.weight.sources], []).append(name)
    shards, stored_names = {}, set()
    for name, read in _read(folder, weights.listed):
        stored_names.add(name)
        for holder in holders.get(name, ()):
            held_weight, full = weights.held[holder], read()
            layout = held_weight.weight.layout  # the vocabulary may be padded otherwise
            shards[holder] = layout.shard(layout.join(layout.split(full)), *weights.place(held_weight.weight)).clone()
            if shards[holder].shape != held_weight.stored.shape:
                raise ValueError(
                    f"{folder} has {name} with the shape {tuple(full.shape)}, which does not fit the model that was prepared. Use "
                    "a configuration of the same sizes."
                )
    missing = sorted({weight.name for weight in weights.weights} - stored_names)
    surplus = sorted(stored_names - {weight.name for weight in weights.listed})
    if missing or surplus:
        names = ", ".join((missing or surplus)[:3])
        raise ValueError(
            f"{folder} {'lacks' if missing else 'has'} {names}, which the model that was prepared "
            f"{'has' if missing else 'lacks'}. Use a configuration of the same kind and sizes."
        )
    return shards


def _read(folder: Path, listed: Sequence[Weight]) -> Stored:
    """The full parameters of a model, as far as they are stored."""
    if (folder / ".metadata").is_file():
        return _read_stacked(folder, listed)
    if any(folder.glob(f"mp_rank_*/{RANK_FILE}")):
        return _read_ranks(folder, {weight.name: weight for weight in listed})
    raise FileNotFoundError(
        f"{folder} has neither .metadata (torch_dist) nor mp_rank_*/{RANK_FILE} (torch). Pass a folder with one of them, or convert "
        "the checkpoint to torch_dist with Megatron-LM."
    )


def _plain_name(name: str) -> str:
    """A parameter's name with local layers."""
    for local, fused in FUSED.items():
        name = name.replace(fused, local)
    return name


# ---- torch_dist -----------------------------------------------------------------------------------------------------


def _stacked_name(name: str) -> tuple[str, tuple[int, ...]]:
    """The name of the tensor in which a parameter is, and its indices there: those of its layer and of its expert."""
    indices = []
    if match := LAYER.search(name):
        indices.append(int(match[2]))
        name = LAYER.sub(r"\1.layers.", name)
    if match := EXPERT.search(name):
        indices.append(int(match[1]))
        name = EXPERT.sub(".experts.", name)
    return name, tuple(indices)


def _read_stacked(folder: Path, listed: Sequence[Weight]) -> Stored:
    from accel_integrations.training_state.formats.shards import ShardedModel

    model = ShardedModel(folder)
    names: dict[str, dict[tuple[int, ...], str]] = {}
    for weight in listed:
        stacked, indices = _stacked_name(weight.name)
        names.setdefault(stacked, {})[indices] = weight.name
    for key, stored in model.tensors.items():
        if not key.startswith(OF_MODEL):
            continue
        name = _plain_name(key)
        members = names.get(name, {(): name})
        expected = tuple(index + 1 for index in max(members))
        if stored.shape[: len(expected)] != expected:
            raise ValueError(
                f"{folder} has {key} with the shape {list(stored.shape)}, but the model that was prepared has {list(expected)} layers "
                "(and experts). Use a configuration of the same sizes."
            )
        read = cache(partial(model.read_tensor, key))  # once for all layers, if this rank has any of them
        for indices, member in members.items():
            yield member, partial(_at, read, indices)


def _at(read: Callable[[], Tensor], indices: tuple[int, ...]) -> Tensor:
    return read()[indices]


def save_weights(
    folder: str | os.PathLike[str], iteration: int, weights: ShardedWeights, chunks: Chunks, device: torch.device
) -> None:
    """Write the weights as Megatron-LM's format `torch_dist` has them; all ranks call this.

    Args:
        folder: The folder of the run; the checkpoint is `iter_*` in it, which appears when it is complete.
        iteration: Its number.
        weights: The weights of the prepared model.
        chunks: This rank's part of it.
        device: Where it is.

    Raises:
        OSError: It could not be written.
    """
    with on_device(device):
        entries = [(name, entry) for module in chunks.modules for name, entry in module.sharded_state_dict().items()]
    kind = load("dist_checkpointing.mapping").ShardedObject
    # entries for FP8, which are empty here, but asked for by megatron-core when it loads
    objects = _union({entry.unique_key: [None] for _, entry in entries if isinstance(entry, kind)})
    keys = _union({_stacked_name(name)[0]: entry.key for name, entry in entries if not isinstance(entry, kind)})
    is_writer = dist.get_rank() == 0
    stacks: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for weight, full in weights.gather(
        {name: held_weight.stored.detach() for name, held_weight in weights.held.items()}
    ):
        if is_writer:
            name, indices = _stacked_name(weight.name)
            rows = full[: weight.layout.num_tokens] if isinstance(weight.layout, Vocabulary) else full
            stacks.setdefault(keys[name], {})[indices] = rows.to("cpu", copy=True)
    error: Exception | None = None
    if is_writer:
        try:
            _write(Path(folder), iteration, objects | {key: _stack(members) for key, members in stacks.items()})
        except Exception as problem:
            error = problem
    raise_on_all_ranks(error)


def _union(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries of all ranks; all ranks call this."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, entries)
    return {key: value for of_rank in of_ranks for key, value in of_rank.items()}


def _stack(members: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """A parameter of all layers, and of all experts, from those of each."""
    sizes = [index + 1 for index in max(members)]
    stacked = torch.stack([members[indices] for indices in sorted(members)])
    return stacked.view(*sizes, *stacked.shape[1:])


def _write(folder: Path, iteration: int, state: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    staged = StagedFolder(folder / f"iter_{iteration:07d}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # which is meant
            dcp.save(state, storage_writer=dcp.FileSystemWriter(staged.path), no_dist=True)
        with DurableFile(staged.path / "common.pt") as file:
            serialize(
                {"iteration": iteration, "checkpoint_version": CHECKPOINT_VERSION}, file, safe_serialization=False
            )
        with DurableFile(staged.path / "metadata.json") as file:
            file.write(json.dumps(FORMAT).encode())
        staged.publish(replaces=[".metadata", "__0_0.distcp", "common.pt", "metadata.json"], last="metadata.json")
    except BaseException:
        staged.discard()
        raise
    with write_atomically(folder / LATEST) as file:
        file.write(str(iteration).encode())


# ---- torch ----------------------------------------------------------------------------------------------------------


def _read_ranks(folder: Path, listed: Mapping[str, Weight]) -> Stored:
    """Parameters from the shards of all tensor-parallel ranks, chunk by chunk."""
    chunks: dict[
        tuple[int, int], dict[int, Mapping[str, Any]]
    ] = {}  # by virtual stage and stage, then by tensor-parallel rank
    for path in sorted(folder.glob("mp_rank_*")):
        match = RANK_FOLDER.fullmatch(path.name)
        if match is None:
            raise ValueError(
                f"{path} is of a mixture of experts, which is read from torch_dist only. Convert the checkpoint with Megatron-LM."
            )
        for virtual, state in enumerate(_models(path / RANK_FILE)):
            chunks.setdefault((virtual, int(match[2] or 0)), {})[int(match[1])] = state
    num_before: Counter[str] = Counter()
    for _, by_rank in sorted(chunks.items()):
        states = [by_rank[rank] for rank in sorted(by_rank)]
        num_layers: Counter[str] = Counter()
        for key, value in states[0].items():
            if not isinstance(value, Tensor):
                continue
            name = _plain_name(key)
            if match := LAYER.search(name):
                block, number = match[1], int(match[2])
                num_layers[block] = max(num_layers[block], number + 1)
                name = LAYER.sub(f"{block}.layers.{num_before[block] + number}.", name)
            layout = listed[name].layout if name in listed else REPLICATED
            yield name, partial(layout.unshard, [state[key] for state in states])
        num_before += num_layers


def _models(path: Path) -> list[Mapping[str, Any]]:
    """The state dicts of the chunks of one rank."""
    with torch.serialization.safe_globals(load("safe_globals").SAFE_GLOBALS):
        state = load_file(path, map_location="cpu", mmap=True)
    version = state.get("checkpoint_version", 0)
    if version < CHECKPOINT_VERSION:
        raise ValueError(
            f"{path} has checkpoint_version={version}, older than megatron-core's {CHECKPOINT_VERSION}. Convert the checkpoint with "
            "Megatron-LM."
        )
    if "model" in state:
        return [state["model"]]
    return [
        state[f"model{number}"] for number in range(sum(re.fullmatch(r"model\d+", key) is not None for key in state))
    ]
