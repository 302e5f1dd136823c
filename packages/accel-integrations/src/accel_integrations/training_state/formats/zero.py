"""Reading the states that DeepSpeed wrote, by names of parameters, without DeepSpeed.

A folder holds one engine of DeepSpeed: file `..._model_states.pt` has names and shapes of parameters, buffers and frozen
parameters, and one file `..._optim_states.pt` for each rank has its flat buffers of float32 weights and optimizer states,
which `flat_layout` finds tensors in.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.serialization import safe_globals
from typing_extensions import override

from accel_integrations.training_state.formats.flat_layout import FlatPiece, divided_pieces, joined_pieces
from accel_integrations.training_state.interface import Keys, StoredState
from accel_ops.files.filenames import MODEL_NAME, numbered
from accel_ops.files.serialization import load

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
OPTIMIZER_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class _StandIn:
    """Stands for a class of DeepSpeed whose values are not used."""


STAND_INS: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *(
        (_StandIn, f"deepspeed.{name}")
        for name in (
            "runtime.fp16.loss_scaler.LossScaler",
            "runtime.fp16.loss_scaler.DynamicLossScaler",
            "utils.tensor_fragment.fragment_address",
        )
    ),
]
"""What DeepSpeed's files name beside plain data, and what is made of it; DeepSpeed itself need not be installed."""


def engine_folder(folder: Path, index: int) -> Path:
    """The folder of the engine at `index` in a checkpoint."""
    return folder / numbered(MODEL_NAME, index)


def holds_engine(folder: Path) -> bool:
    """Whether a folder holds an engine of DeepSpeed."""
    return folder.is_dir() and any(MODEL_STATES.fullmatch(path.name) for path in folder.iterdir())


def has_known_files(folder: Path) -> bool:
    """Whether the states in a folder are sharded by ZeRO alone."""
    return not _unknown_files(folder)


def _unknown_files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.pt"))
    return [name for name in names if not (MODEL_STATES.fullmatch(name) or OPTIMIZER_STATES.fullmatch(name))]


@dataclass(frozen=True)
class ZeroFiles:
    """The files of one engine of DeepSpeed.

    Attributes:
        folder: Their folder.
        stage: The ZeRO stage; 0 without.
        models: What each rank wrote about the model; one entry where all would write the same.
        shards: The optimizer state of each rank; none in stage 0.
    """

    folder: Path
    stage: int
    models: Sequence[Mapping[str, Any]]
    shards: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> ZeroFiles:
        """Read the files; tensors are memory-mapped.

        Raises:
            ValueError: Files are missing, damaged, hold more than plain data, or shards of another parallelism.
        """
        names = sorted(path.name for path in folder.glob("*.pt"))
        if unknown := _unknown_files(folder):
            raise ValueError(
                f"{folder} holds {unknown[0]!r}: DeepSpeed has sharded layers, experts or stages there, which is only read "
                "by DeepSpeed with the same settings. Load it with these, or convert its weights with zero_to_fp32.py."
            )
        models = [_read(folder / name) for name in _by_rank(names, MODEL_STATES)]
        shards = [_read(folder / name) for name in _by_rank(names, OPTIMIZER_STATES)]
        states = [state for shard in shards if isinstance(state := shard.get("optimizer_state_dict"), Mapping)]
        if not models or len(states) < len(shards):
            raise ValueError(f"{folder} holds no state of an engine of DeepSpeed. Load another checkpoint.")
        stage = int(states[0].get("zero_stage", 1)) if states else 0
        files = cls(folder, stage, models, states)
        files._check_complete()
        return files

    def _check_complete(self) -> None:
        if not self.shards:
            return
        counts = self.shards[0].get("partition_count", len(self.shards))
        num_ranks = max(counts) if isinstance(counts, (list, tuple)) else counts
        models = len(self.shards) if self.stage == 3 else 1
        if num_ranks != len(self.shards) or len(self.models) != models:
            raise ValueError(
                f"{self.folder} lacks files: it was saved by {num_ranks} ranks, but has optimizer states of "
                f"{len(self.shards)} and model states of {len(self.models)} (of {models}). Copy the files of all ranks "
                "into one folder."
            )

    @property
    def has_optimizer(self) -> bool:
        """Whether the engine trained."""
        return bool(self.shards) or self.model.get("optimizer") is not None

    # ---- layout -------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Mapping[str, Any]:
        """What the first rank wrote about the model."""
        return self.models[0]

    @property
    def flat_shapes(self) -> Sequence[Mapping[str, Sequence[int]]]:
        """Names and shapes of the tensors in each flat buffer."""
        shapes: Sequence[Mapping[str, Sequence[int]]] = self.model.get("param_shapes") or ()
        return shapes

    def flat_weights(self, index: int) -> list[torch.Tensor]:
        """The flat buffer of each rank that holds float32 weights."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return [shard[key][index] for shard in self.shards]

    def pieces(self, index: int) -> list[FlatPiece]:
        """The layout of a flat buffer."""
        shapes = self.flat_shapes[index]
        if self.stage == 3:
            return list(divided_pieces(shapes, len(self.shards)))
        paddings = self.shards[0].get("param_alignment_paddings")
        lengths = [len(buffer) for buffer in self.flat_weights(index)]
        return list(joined_pieces(shapes, lengths, None if paddings is None else paddings[index]))

    def base_states(self) -> list[Mapping[str, Any]]:
        """The `state_dict()` of the optimizer inside, on each rank.

        Raises:
            ValueError: It is not in this form.
        """
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        entries = [shard.get(key) for shard in self.shards] if self.stage else [self.model.get("optimizer")]
        states = [state for state in entries if isinstance(state, Mapping) and "param_groups" in state]
        if len(states) != len(entries):
            form = "elastic_checkpoint" if self.stage else "mixed precision without ZeRO"
            raise ValueError(
                f"The optimizer state in {self.folder} is in the form that DeepSpeed writes with {form}, which is only "
                "read by DeepSpeed with the same settings. Load it with these."
            )
        return states


def _by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    pairs = [(int(match[1] or 0), name) for name in names if (match := pattern.fullmatch(name))]
    return [name for _, name in sorted(pairs)]


def _read(path: Path) -> Mapping[str, Any]:
    with safe_globals(STAND_INS):
        content = load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__} instead of a state dict. Load another checkpoint.")
    return content


# ---- by names -------------------------------------------------------------------------------------------------------


@final
class ZeroState(StoredState):
    """Tensors that are pieces of the flat buffers of all ranks, full tensors, and other values.

    Args:
        where: The folder.
    """

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self._full: dict[Keys, torch.Tensor] = {}
        self._pieces: dict[Keys, list[tuple[FlatPiece, torch.Tensor]]] = {}
        self._values: dict[Keys, Any] = {}

    def add_full(self, keys: Keys, tensor: torch.Tensor) -> None:
        """Add a tensor as it is."""
        self._full[keys] = tensor
        self.shapes[keys] = tuple(tensor.shape)

    def add_pieces(
        self, prefix: Keys, suffix: Keys, shapes: Mapping[str, Sequence[int]], pieces: Iterable[FlatPiece],
        buffers: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Add all tensors of a flat buffer.

        Args:
            prefix: The keys before the name of a tensor.
            suffix: The keys behind it.
            shapes: The tensors.
            pieces: Their layout.
            buffers: The buffer of each rank.

        Raises:
            ValueError: A buffer is too short, or the layout does not cover a tensor.
        """
        covered = dict.fromkeys(shapes, 0)
        for piece in pieces:
            if piece.position + piece.count > len(buffers[piece.rank]):
                raise ValueError(
                    f"{self.where} is damaged: the buffer of rank {piece.rank} has {len(buffers[piece.rank])} values, too "
                    f"few for {piece.name!r}. Load another checkpoint."
                )
            covered[piece.name] += piece.count
            self._pieces.setdefault((*prefix, piece.name, *suffix), []).append((piece, buffers[piece.rank]))
        for name, shape in shapes.items():
            if covered[name] != torch.Size(shape).numel():
                raise ValueError(f"{self.where} is damaged: values of {name!r} are missing. Load another checkpoint.")
            self.shapes[*prefix, name, *suffix] = tuple(shape)

    def add_value(self, keys: Keys, value: Any) -> None:
        """Add anything else."""
        self._values[keys] = value
        self.objects.append(keys)

    @override
    def dtype(self, keys: Keys) -> torch.dtype:
        return self._full[keys].dtype if keys in self._full else self._pieces[keys][0][1].dtype

    @override
    def read(self, keys: Keys, offsets: Sequence[int], sizes: Sequence[int], into: torch.Tensor) -> None:
        """Copy a shard; no more than its rows are read at once."""
        if not into.numel():
            return
        if keys in self._full:
            rows = self._full[keys][offsets[0] : offsets[0] + sizes[0]] if sizes else self._full[keys]
        else:
            rows = self._rows(keys, offsets[0], sizes[0]) if sizes else self._rows(keys, 0, 1).view(())
        inner = tuple(slice(begin, begin + size) for begin, size in zip(offsets[1:], sizes[1:], strict=True))
        into.copy_(rows[:, *inner] if inner else rows)

    def _rows(self, keys: Keys, begin: int, count: int) -> torch.Tensor:
        """Consecutive rows of a tensor."""
        inner = self.shapes[keys][1:]
        width = torch.Size(inner).numel()
        first, last = begin * width, (begin + count) * width
        flat = torch.empty(last - first, dtype=self.dtype(keys))
        for piece, buffer in self._pieces[keys]:
            low, high = max(first, piece.begin), min(last, piece.begin + piece.count)
            if low < high:
                start = piece.position + low - piece.begin
                flat[low - first : high - first] = buffer[start : start + high - low]
        return flat.view(count, *inner)

    @override
    def read_object(self, keys: Keys) -> Any:
        return self._values[keys]


def zero_model_state(files: ZeroFiles) -> ZeroState:
    """The weights of an engine, in float32 where ZeRO keeps them so, and buffers.

    Raises:
        ValueError: They are damaged, or not complete.
    """
    state = ZeroState(files.folder)
    held: Mapping[str, Any] = files.model.get("module") or {}
    flat = {name for shapes in files.flat_shapes for name in shapes}
    shared: Mapping[str, str] = files.model.get("shared_params") or {}
    frozen: Mapping[str, Sequence[int]] = files.model.get("frozen_param_shapes") or {}
    for index, shapes in enumerate(files.flat_shapes):
        state.add_pieces((), (), shapes, files.pieces(index), files.flat_weights(index))
    in_shards = frozen if files.stage == 3 else {}
    if in_shards:
        for name, shape in in_shards.items():
            parts = [model["frozen_param_fragments"][name].flatten() for model in files.models]
            state.add_pieces((), (), {name: shape}, divided_pieces({name: shape}, len(parts)), parts)
    for name, value in held.items():
        if name in flat or name in in_shards or (name in shared and shared[name] in flat | in_shards.keys()):
            continue
        if isinstance(value, torch.Tensor):
            state.add_full((name,), value)
        else:
            state.add_value((name,), value)
    return state


def zero_optimizer_state(files: ZeroFiles) -> ZeroState:
    """The optimizer state of an engine: by names of parameters, or by their indices in stage 0.

    Raises:
        ValueError: It is damaged, or in a form that only DeepSpeed reads.
    """
    state, base = ZeroState(files.folder), files.base_states()
    if not files.stage:
        for number, values in base[0]["state"].items():
            for key, value in values.items():
                _add(state, ("state", str(number), key), value)
        state.add_value(("param_groups",), base[0]["param_groups"])
        return state
    groups, index = [], 0
    for group in base[0]["param_groups"]:
        names: list[str] = []
        for number in group["params"]:  # one for each flat buffer
            _add_flat(state, files, index, [one["state"].get(number, {}) for one in base])
            names += files.flat_shapes[index]
            index += 1
        groups.append({**group, "params": names})
    if index != len(files.flat_shapes):
        raise ValueError(
            f"{files.folder} is damaged: it names {len(files.flat_shapes)} flat buffers, but has {index}. Load another "
            "checkpoint."
        )
    state.add_value(("param_groups",), groups)
    return state


def _add_flat(state: ZeroState, files: ZeroFiles, index: int, values: Sequence[Mapping[str, Any]]) -> None:
    """Add the optimizer states of a flat buffer: those of its length by pieces, others for each parameter in it."""
    shapes, lengths = files.flat_shapes[index], [len(buffer) for buffer in files.flat_weights(index)]
    for key, first in values[0].items():
        if not isinstance(first, torch.Tensor) or not first.dim():
            for name in shapes:
                _add(state, ("state", name, key), first)
            continue
        buffers = [of_rank[key] for of_rank in values]
        if first.dim() != 1 or any(len(one) < length for one, length in zip(buffers, lengths, strict=True)):
            raise ValueError(
                f"{files.folder} holds {key!r} of an optimizer with shape {tuple(first.shape)}, which is not that of the "
                "flat weights: it cannot be divided among parameters. Load it with DeepSpeed and the same settings."
            )
        state.add_pieces(("state",), (key,), shapes, files.pieces(index), buffers)


def _add(state: ZeroState, keys: Keys, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        state.add_full(keys, value)
    else:
        state.add_value(keys, value)
