"""`ParallelismConfig`: sizes of data, tensor, context, sequence and pipeline parallelism, and the device mesh of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, cast

from accel_state.guessing import guess_arguments
from accel_state.mesh_axes import MESH_AXES, DataShard
from accel_state.public_names import known_as
from accel_state.settings.option import at_least, one_of, option, resolve_options, wrong_value
from accel_state.settings.parallelism import (
    DeepSpeedSequenceParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OWN_GROUP = (("tp",), ("cp",))
"""Axes that do not share the default group of gloo, even if they span all processes: their groups have one thread."""
JOINED_AXES = {"dp": "dp_dim_names", "dp_shard_cp": "dp_shard_cp_dim_names", "dp_cp": "dp_cp_dim_names"}
"""Axes that are several axes flattened into one, with the property that names those."""


def _size(axis: str, what: str) -> Any:
    name = f"{axis}_size"
    return option(
        None,
        kind=at_least(1),
        env=f"PARALLELISM_CONFIG_{name.upper()}",
        flag=f"--parallelism_config_{name}",
        help=f"How many processes {what}.",
        fallback=1,
    )


def _backend(axis: str, *choices: str, default: str | None = None) -> Any:
    return option(
        None,
        choices=choices,
        env=f"PARALLELISM_CONFIG_{axis.upper()}_BACKEND",
        flag=f"--parallelism_config_{axis}_backend",
        help=f"Library that implements the {axis} axis.",
        fallback=default,
    )


@known_as("accelerate.parallelism_config.ParallelismConfig")
@guess_arguments
@dataclass(repr=False)
class ParallelismConfig:
    """The sizes of all kinds of parallelism of a run.

    The product of the sizes is the number of processes; sizes left out are 1.

    Args:
        dp_replicate_size (`int`): Replicas of the model, which read different data.
        dp_shard_size (`int`): Ranks over which the parameters of a replica are sharded (FSDP); they read different data.
        tp_size (`int`): Ranks over which every layer is sharded (tensor parallelism).
        cp_size (`int`): Ranks over which sequences are sharded, by ring attention (context parallelism).
        cp_backend (`"torch"`): Implementation of context parallelism.
        sp_size (`int`): Ranks over which sequences are sharded, by all-to-all of attention heads (sequence parallelism).
        sp_backend (`"deepspeed"` or `"torch"`, *optional*): Implementation of sequence parallelism; "torch" needs no DeepSpeed.
            Left out, `Accelerator` sets it: "deepspeed" with a `DeepSpeedPlugin` or an `sp_handler`, else "torch". Launchers set the
            variable to "deepspeed" without being asked, so that counts as left out.
        tp_handler (`TorchTensorParallelConfig`, *optional*): Details; created with its defaults when the axis is used.
        cp_handler (`TorchContextParallelConfig`, *optional*): As above.
        sp_handler (`DeepSpeedSequenceParallelConfig`, *optional*): As above.
        pp_size (`int`): Ranks that hold consecutive stages of the model (pipeline parallelism).
        pp_handler (`PipelineParallelConfig`, *optional*): As above.

    Example:
        ```python
        config = ParallelismConfig(dp_shard_size=4, tp_size=2)
        accelerator = Accelerator(parallelism_config=config)  # on 8 processes
        ```
    """

    dp_replicate_size: int = _size("dp_replicate", "hold a replica of the model each")
    dp_shard_size: int = _size("dp_shard", "shard the parameters of one replica")
    tp_size: int = _size("tp", "shard every layer")
    cp_size: int = _size("cp", "shard sequences by ring attention")
    cp_backend: Literal["torch"] = _backend("cp", "torch", default="torch")
    sp_size: int = _size("sp", "shard sequences by all-to-all of attention heads")
    sp_backend: Literal["deepspeed", "torch"] | None = _backend("sp", "deepspeed", "torch")
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int = _size("pp", "hold consecutive stages of the model")
    pp_handler: PipelineParallelConfig | None = None

    device_mesh = cast("DeviceMesh | None", None)  # no annotation: an attribute, not a field

    def __post_init__(self) -> None:
        self._joined: dict[str, DeviceMesh] = {}
        is_left_out = self.sp_backend is None
        resolve_options(self)
        self._sizes = {axis: self._size_of(axis) for axis in MESH_AXES}  # libraries add axes of their own
        self._check_sizes()
        self._fill_handler("tp", TorchTensorParallelConfig)
        self._fill_handler("cp", TorchContextParallelConfig)
        if is_left_out and self.sp_backend != "torch":
            self.sp_backend = "deepspeed" if self.sp_size == 1 or self.sp_handler is not None else None
        if self.sp_backend != "torch":
            self._fill_handler("sp", DeepSpeedSequenceParallelConfig)
        self._fill_handler("pp", PipelineParallelConfig)

    def _check_sizes(self) -> None:
        if self.cp_size > 1 and self.sp_size > 1:
            raise ValueError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both shard the sequence: set one of them to 1."
            )

    def _fill_handler(self, axis: str, handler_class: type) -> None:
        name = f"{axis}_handler"
        handler = getattr(self, name)
        if handler is None:
            if self._size_of(axis) > 1:
                setattr(self, name, handler_class())
        elif not isinstance(handler, handler_class):
            raise wrong_value(f"ParallelismConfig.{name}", handler, f"a {handler_class.__name__}")
        elif self._size_of(axis) == 1:
            warn_user(
                f"ParallelismConfig.{name}={handler!r} has no effect with {axis}_size=1: increase {axis}_size, or leave "
                "it out."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_joined": {}}  # flattened meshes are created again

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled one; those of accelerate 1.15 have no pipeline fields."""
        self.__dict__.update({"pp_size": 1, "_joined": {}, **state})

    def __repr__(self) -> str:
        parts = [f"{row.name}={getattr(self, row.name)!r}" for row in fields(self)]
        return f"ParallelismConfig({', '.join(parts)}, total_size={self.total_size})"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; handlers become dictionaries, unused ones None."""
        values = asdict(self)
        if self.pp_handler is not None and self.pp_handler.loss_weight is not None:
            values["pp_handler"]["loss_weight"] = getattr(self.pp_handler.loss_weight, "__qualname__", "a function")
        return values

    # ---- sizes ------------------------------------------------------------------------------------------------------

    def _size_of(self, axis: str) -> int:
        size: int = getattr(self, f"{axis}_size")
        return size

    def _set_size(self, parallelism: str, size: int) -> None:
        """Change the size of an axis. Libraries with axes of their own call this."""
        if parallelism not in self._sizes:
            raise ValueError(f"{parallelism!r} is no axis: it must be one of {', '.join(self._sizes)}.")
        self._sizes[parallelism] = size
        setattr(self, f"{parallelism}_size", size)

    def _used(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._size_of(axis) > 1]

    @property
    def total_size(self) -> int:
        """How many processes the configuration describes."""
        return math.prod(self._size_of(axis) for axis in MESH_AXES)

    @property
    def data_parallel_size(self) -> int:
        """The number of different batches that are processed at a time."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes work on one batch."""
        return self.pp_size * self.tp_size * self.cp_size * self.sp_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas of the model."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded between processes that read different data."""
        return self.dp_shard_size > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are sharded by tensor parallelism."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are sharded by ring attention."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are sharded by all-to-all of attention heads."""
        return self.sp_size > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether ranks hold consecutive stages of the model."""
        return self.pp_size > 1

    # ---- names of axes ----------------------------------------------------------------------------------------------

    @property
    def dp_dim_names(self) -> list[str]:
        """Axes in use along which ranks read different data."""
        return self._used("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes in use along which the batch is the same."""
        return self._used("tp", "cp", "sp", "pp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes in use over which parameters are sharded."""
        return self._used("dp_shard", "cp", *self._own_sequence_axis)

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes in use over which gradients, and hence losses, are averaged."""
        return self._used("dp_replicate", "dp_shard", "cp", *self._own_sequence_axis)

    @property
    def _own_sequence_axis(self) -> tuple[str, ...]:
        """The sequence axis where it is part of the mesh; DeepSpeed creates process groups of its own for it."""
        return ("sp",) if self.sp_backend == "torch" else ()

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes that `fully_shard` gets: that of replicas, if any, and the joined sharding axis."""
        return [*self._used("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes in use."""
        return self.dp_dim_names + self.non_dp_dim_names

    # ---- the mesh ---------------------------------------------------------------------------------------------------

    def check_world_size(self, num_processes: int) -> None:
        """Raise an error if the product of the sizes is not the world size; sizes of 1 only fit any run.

        Raises:
            ValueError: Naming the sizes, their product and the number of processes.
        """
        if self.total_size in (1, num_processes):
            return
        factors = " x ".join(f"{axis}_size={self._size_of(axis)}" for axis in MESH_AXES if self._size_of(axis) > 1)
        raise ValueError(
            f"ParallelismConfig describes {factors} = {self.total_size} processes, but the run has {num_processes}: "
            f"change the sizes so that their product is the number of processes, or launch {self.total_size} processes."
        )

    def choose_backend(self, has_deepspeed: bool) -> None:
        """Choose the implementation of sequence parallelism where it was left out.

        Args:
            has_deepspeed (`bool`): Whether the run trains with DeepSpeed.
        """
        if self.sp_backend is None:
            self.sp_backend = "deepspeed" if has_deepspeed else "torch"
            if not has_deepspeed:
                self.sp_handler = None

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Called with the `Accelerator` whose state was made with this configuration. Other libraries monkeypatch it."""
        self.check_world_size(accelerator.num_processes)

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The axes in use and their sizes, in the order of the mesh."""
        names = tuple(self._used(*MESH_AXES))
        return names, tuple(map(self._size_of, names))

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Create the device mesh of the axes in use, and flatten the axes that are used together.

        The joined axes "dp", "dp_shard_cp" and "dp_cp" are reached through `axis_mesh`.

        Args:
            device_type: For example "cuda" or "cpu".

        Returns:
            The mesh, its axes in the order of `MESH_AXES`. None when no axis is in use, and for sequence parallelism
            by DeepSpeed, which creates its own process groups.

        Raises:
            ValueError: When the product of the sizes is not the number of processes.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from accel_state.gloo_groups import one_thread_each

        if self.total_size == 1 or (self.sp_enabled and not self._own_sequence_axis):
            return None
        if dist.is_initialized():
            self.check_world_size(dist.get_world_size())
        names, shape = self._get_mesh()
        of_its_own = names in OWN_GROUP and dist.is_initialized() and dist.get_backend() == "gloo"
        # Only where it is needed: programs replace `init_device_mesh` by functions that do not know this argument.
        options: Any = {"backend_override": {names[0]: "gloo"}} if of_its_own else {}
        with one_thread_each():
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=names, **options)
            self._joined = {
                joined: mesh[members]._flatten(joined)
                for joined, source in JOINED_AXES.items()
                if (members := getattr(self, source))
            }
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The device mesh, created at the first call.

        Args:
            device_type: For example "cuda" or "cpu"; needed at the first call only.

        Raises:
            ValueError: When there is no mesh yet and no device type is passed, or the mesh is for another one.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError(
                    'No device mesh has been built yet: pass the device type, for example get_device_mesh("cuda").'
                )
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type is not None and self.device_mesh.device_type != device_type:
            raise ValueError(
                f"The device mesh was built for {self.device_mesh.device_type!r}, not for {device_type!r}: call this without "
                "a device type, or create another ParallelismConfig."
            )
        return self.device_mesh

    def axis_mesh(self, name: str) -> DeviceMesh | None:
        """The one-dimensional mesh of an axis or joined axis; None when it is not in use or no mesh was made.

        Args:
            name: One of `MESH_AXES`, or "dp", "dp_shard_cp", "dp_cp".

        Raises:
            ValueError: For any other name.
        """
        if name in JOINED_AXES:
            return self._joined.get(name)
        one_of(*MESH_AXES, *JOINED_AXES).read("axis", name)
        mesh = self.device_mesh
        return mesh[name] if mesh is not None and name in (mesh.mesh_dim_names or ()) else None

    def data_shard(self, process_index: int, num_processes: int) -> DataShard:
        """Which shard of the data a process reads; needs no mesh.

        Args:
            process_index: The process, from 0.
            num_processes: Size of the run. When all sizes are 1, every process reads a slice of its own.

        Raises:
            ValueError: When the product of the sizes is not the number of processes.
        """
        self.check_world_size(num_processes)
        pipeline = num_processes // self.pp_size  # the slowest axis: the processes of one stage are consecutive ranks
        per_batch = self.non_data_parallel_size // self.pp_size
        return DataShard(process_index % pipeline // per_batch, pipeline // per_batch)

    def data_place(self, process_index: int, num_processes: int) -> DataShard:
        """The name of `data_shard` in 1.16.0."""
        return self.data_shard(process_index, num_processes)
