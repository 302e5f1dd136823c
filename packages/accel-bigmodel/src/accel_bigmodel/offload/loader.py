"""Offloaded weights by name, wherever they are stored."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from accel_bigmodel.dtypes import as_dtype
from accel_bigmodel.offload.folder import check_entry, load_offloaded_weight, read_index
from accel_ops.files.staging import path_inside
from accel_state.public_names import known_as

Home = tuple[MutableMapping[str, torch.Tensor], str]


@known_as("accelerate.utils.offload.OffloadedWeightsLoader")
class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights in CPU memory, in checkpoint files and in a folder, as one mapping.

    Files are memory-mapped on first use and stay mapped: a weight that is used again is neither read again nor
    copied.

    Args:
        state_dict: Weights in memory, by name.
        save_folder: A folder of offloaded weights.
        index: The weights on disk, by name: `dtype` and `shape`; or `safetensors_file` and `weight_name`
            (the name itself if left out), and `dtype` if it is to be converted. The index of the folder when None.
        device: Device of weights from checkpoint files; CPU memory when None.

    Raises:
        ValueError: When all are left out.
    """

    state_dict: Any
    save_folder: str | os.PathLike[str] | None
    index: Any
    device: torch.device | str | int | None
    all_keys: list[str]

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader got no weights: pass state_dict, save_folder or index.")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index = index if index is not None else read_index(save_folder) if save_folder is not None else {}
        self.device = device
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self._mapped: dict[str, tuple[Any, torch.Tensor]] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        tensor, info = self.stored(key), self.index[key]
        if info.get("safetensors_file") is None:
            return tensor
        dtype = as_dtype(info["dtype"]) if info.get("dtype") else tensor.dtype
        return tensor.to(device=self.device, dtype=dtype)  # a converted copy is not cached

    def stored(self, key: str) -> torch.Tensor:
        """A weight on disk in its stored dtype, memory-mapped."""
        info = self.index.get(key)
        if info is None:
            raise KeyError(
                f"There is no offloaded weight {key!r}: the index belongs to another model, or is incomplete."
            )
        entry = self._mapped.get(key)
        if entry is None or entry[0] is not info:
            entry = self._mapped[key] = (info, self._open(key, info))
        return entry[1]

    def _open(self, key: str, info: Mapping[str, Any]) -> torch.Tensor:
        check_entry(key, info, self.save_folder or "")
        if info.get("safetensors_file") is None:
            if self.save_folder is None:
                raise ValueError(f"The offloaded weight {key!r} is in a folder, but no save_folder was given.")
            return load_offloaded_weight(path_inside(self.save_folder, f"{key}.dat"), info)
        from accel_ops.files.mapped import mapped_shard

        return mapped_shard(info["safetensors_file"]).tensor(info.get("weight_name", key))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_mapped"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _mapped={})  # a copy maps the files again, and does not load them into memory

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


@known_as("accelerate.utils.offload.PrefixedDataset")
class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The entries of a mapping that belong to one module, by the names in that module.

    Args:
        dataset: The mapping.
        prefix: The module's name and a dot, which is put before names.
    """

    dataset: Mapping[str, torch.Tensor]
    prefix: str

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


def find_source(weights: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, Home | None]:
    """An offloaded weight in its stored dtype, with the mapping that holds it in CPU memory and its key, or None."""
    while isinstance(weights, PrefixedDataset):
        name = f"{weights.prefix}{name}"
        weights = weights.dataset
    if isinstance(weights, OffloadedWeightsLoader):
        if name not in weights.state_dict:
            return weights.stored(name), None
        weights = weights.state_dict
    return weights[name], (weights, name) if isinstance(weights, MutableMapping) else None


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The weights of some modules, by their full names.

    Args:
        state_dict: Weights by name.
        submodule_names: Names of modules or weights; `""` stands for all.
    """
    names = list(submodule_names)
    if "" in names:
        return dict(state_dict)
    weights = {}
    for name in names:
        weights.update({key: value for key, value in state_dict.items() if key == name or key.startswith(f"{name}.")})
    return weights


def check_weights_are_stored(
    model: nn.Module, stored: Container[str], folder: str | os.PathLike[str], modules: Iterable[str] = ("",)
) -> None:
    """Raise an error if offloaded weights are not those of a model.

    Args:
        model: The model.
        stored: The names of the stored weights; one of several tied names is enough.
        folder: Where they are, for the error.
        modules: Names of the modules that need them; `""` stands for all.

    Raises:
        ValueError: Naming a parameter that is missing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored_ids = {id(parameter) for name, parameter in parameters.items() if name in stored}
    module_parameters: dict[str, Any] = extract_submodules_state_dict(parameters, modules)
    missing = [name for name, parameter in module_parameters.items() if id(parameter) not in stored_ids]
    if missing:
        more = f" and {len(missing) - 1} more parameters" if len(missing) > 1 else ""
        raise ValueError(
            f"The offloaded weights in {os.fspath(folder)!r} lack {missing[0]!r}{more} of {type(model).__name__}: they "
            "belong to another model. Give another folder, or remove this one."
        )
