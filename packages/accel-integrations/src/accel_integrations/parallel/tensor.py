"""Tensor parallelism: the ranks of a TP group hold a shard of every layer each."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.parallel.module_states import sync_module_states, sync_random_state
from accel_integrations.parallel.styles import check_plan, expand_plan, make_style
from accel_integrations.parallel.transform import Transform
from accel_integrations.parallel.transformers_plan import brings_own_styles, shard_transformers_model, tensor_plan
from accel_ops.modules import model_has_dtensor
from accel_ops.tied import names_by_parameter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh


def keep_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the shard of a DTensor, in place, when it is a view of something larger.

    Args:
        tensor: What `distribute_tensor(..., src_data_rank=None)` returned; anything but a DTensor stays as it is.

    Returns:
        The same tensor.
    """
    local: Any = getattr(tensor, "_local_tensor", None)
    if local is not None and local.untyped_storage().nbytes() > local.numel() * local.itemsize:
        with torch.no_grad():
            tensor._local_tensor = local.detach().clone()  # type: ignore[attr-defined]
    return tensor


@final
class TensorParallel(Transform):
    """Shards the layers that a plan names; ranks then all-reduce activations, and each holds its shards.

    The plan comes from `TorchTensorParallelConfig(plan=...)`, from the attribute `tp_plan` of the model, or from
    transformers. Models whose parameters are DTensors already, as those that transformers loads with
    `tp_plan="auto"`, are taken as they are.
    """

    axis = "tp"

    @override
    def check(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Check that the model has a plan of known styles and names, and layers that can be sharded evenly.

        Raises:
            ValueError: It does not fit; the message says why, and what would be accepted.
        """
        if model_has_dtensor(model):
            _check_sharded(model, mesh[self.axis].size())
            return
        if self._is_transformers(model):
            tensor_plan(model, mesh[self.axis].size(), self._experts)
            return
        plan = self._plan(model)
        check_plan(model, expand_plan(model, plan), mesh[self.axis].size())

    @override
    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard the layers in place."""
        group = mesh[self.axis]
        sync_module_states(model, [group.get_group()])
        sync_random_state(group)
        if not self._is_sharded(model):
            if self._is_transformers(model):
                shard_transformers_model(model, group, self._experts)
            else:
                parallelize_model(model, group, self._plan(model))
        return model

    @property
    def _experts(self) -> bool:
        handler = self.config.tp_handler
        return handler is not None and handler.expert_parallel

    def _is_sharded(self, model: nn.Module) -> bool:
        if self._experts:  # they are DTensors by now, the other layers perhaps not
            return getattr(model, "_tp_size", None) is not None
        return model_has_dtensor(model)

    def _is_transformers(self, model: nn.Module) -> bool:
        handler = self.config.tp_handler
        return (handler is None or handler.plan is None) and brings_own_styles(model)

    def _plan(self, model: nn.Module) -> Mapping[str, Any]:
        handler = self.config.tp_handler
        plan = handler.plan if handler is not None else None
        for source in (plan, getattr(model, "tp_plan", None), getattr(model, "_tp_plan", None)):
            if source:
                return dict(source)
        raise ValueError(
            f"tp_size={self.config.tp_size} needs a plan for {type(model).__name__}, which has none. Set it as "
            'TorchTensorParallelConfig(plan={"layers.*.attention.query": "colwise", ...}) in '
            "ParallelismConfig.tp_handler, or as the attribute tp_plan of the model."
        )


def parallelize_model(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> nn.Module:
    """Shard a model's layers by a plan, in place.

    Args:
        model: The model, the same on all ranks of the mesh.
        mesh: One-dimensional.
        plan: Style by name of a module, a `*` matches one component of a dotted name.

    Raises:
        ValueError: For a plan that does not fit the model, which is not changed then.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    named = expand_plan(model, plan)
    check_plan(model, named, mesh.size())
    objects = {name: make_style(style) for name, style in named.items()}
    ties = [names for names in names_by_parameter(model).values() if len(names) > 1]
    model = parallelize_module(model, mesh, objects, src_data_rank=None)
    for parameter in model.parameters():
        keep_own_storage(parameter)
    _tie_again(model, ties)
    return model


def _tie_again(model: nn.Module, ties: list[list[str]]) -> None:
    """Tie parameters again that were sharded one by one.

    Args:
        model: The model.
        ties: The names of each tied parameter.

    Raises:
        ValueError: When they were sharded differently.
    """
    for first, *others in ties:
        shared_parameter = model.get_parameter(first)
        for name in others:
            parameter = model.get_parameter(name)
            if parameter is shared_parameter:
                continue
            if getattr(parameter, "placements", None) != getattr(shared_parameter, "placements", None):
                raise ValueError(
                    f"{first} and {name} are one parameter, but the tensor parallel plan shards it in two ways "
                    f"({_placement(shared_parameter)} and {_placement(parameter)}). Give both layers styles that shard the same "
                    "dimension, such as embedding_rowwise and colwise_rep."
                )
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, shared_parameter)


def _placement(parameter: torch.Tensor) -> str:
    placements = getattr(parameter, "placements", None)
    return "not sharded" if placements is None else str(placements[0])


BESIDE_FSDP = ("tp", "ep")
"""Dimensions of transformers' meshes along which layers and experts are sharded, beside those of FSDP."""


def check_ranks_of(model: nn.Module, num_readers: int, num_processes: int) -> None:
    """Check that a model which was sharded before it was prepared is sharded over the ranks of this run.

    The ranks of a TP group must read the same samples, and FSDP must average gradients over all ranks that read others.

    Args:
        model: The model.
        num_readers: Number of ranks that read different samples.
        num_processes: Number of ranks.

    Raises:
        ValueError: It is not; the message has the line to write.
    """
    if not model_has_dtensor(model):
        return
    size = next((size for _, size in _sharded_by_name(model)), 1)
    averaged = ranks_of_fsdp(model)
    if size * num_readers <= num_processes and averaged in (1, num_readers):
        return
    axis = "dp_replicate" if averaged == 1 else "dp_shard"
    sizes = {"tp": size, axis: num_processes // size if averaged == 1 else averaged}
    line = ", ".join(f"{name}_size={ranks}" for name, ranks in sizes.items() if ranks > 1)
    if size * num_readers > num_processes:
        raise ValueError(
            f"{type(model).__name__} is sharded over {size} ranks by tensor parallelism already, but in this run the ranks of a TP "
            f"group would read different samples. Write Accelerator(parallelism_config=ParallelismConfig({line}))."
        )
    raise ValueError(
        f"{type(model).__name__} is sharded by FSDP over {averaged} ranks already, but in this run {num_readers} ranks read different "
        f"samples. Load it over all of them, or launch {averaged * size} processes with ParallelismConfig({line})."
    )


def ranks_of_fsdp(model: nn.Module) -> int:
    """Over how many ranks the FSDP 2 modules of a model average gradients: 1 for a model without."""
    sharded: Iterator[Any] = (
        weight for module in model.modules() if _is_fsdp(module) for weight in module.parameters()
    )
    sizes = (
        math.prod(
            size
            for name, size in zip(_mesh_dim_names(weight), weight.device_mesh.shape, strict=True)
            if name not in BESIDE_FSDP
        )
        for weight in sharded
        if hasattr(weight, "device_mesh")
    )
    return max(sizes, default=1)


def added_after_fsdp(model: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of an FSDP 2 model whose gradients FSDP does not average, such as those of adapters added later."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and all(name in BESIDE_FSDP for name in _mesh_dim_names(parameter))
    ]


def _mesh_dim_names(parameter: nn.Parameter) -> tuple[str, ...]:
    """The dimensions over which a parameter is sharded or replicated; a mesh without names has empty ones."""
    mesh: DeviceMesh | None = getattr(parameter, "device_mesh", None)
    return () if mesh is None else mesh.mesh_dim_names or ("",) * mesh.ndim


def _sharded_by_name(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Names of the DTensors among the parameters, and over how many ranks tensor parallelism has sharded each."""
    by_fsdp = {id(weight) for module in model.modules() if _is_fsdp(module) for weight in module.parameters()}
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        if "tp" in (mesh.mesh_dim_names or ()):
            yield name, mesh["tp"].size() if mesh.ndim > 1 else mesh.size()
        elif id(parameter) not in by_fsdp:
            yield name, mesh.size()


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by whoever has sharded one
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _check_sharded(model: nn.Module, size: int) -> None:
    """Check that a model with DTensors was sharded over as many ranks as this run has."""
    for name, num_shards in _sharded_by_name(model):
        if num_shards != size:
            raise ValueError(
                f"{type(model).__name__} is sharded over {num_shards} ranks already ({name} is), but ParallelismConfig "
                f"has tp_size={size}. Set tp_size={num_shards}, or load the model unsharded."
            )
        return
