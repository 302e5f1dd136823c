"""The one table that names engine classes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pkgutil import resolve_name
from weakref import WeakKeyDictionary, ref

from torch import nn

from accel_integrations.engines.engine import Engine, EngineContext
from accel_state import shutdown
from accel_state.enums import DistributedType

DATA_PARALLEL = "accel_integrations.engines.ddp:DDPEngine"

ENGINES: dict[str, str] = {
    "NO": "accel_integrations.engines.single:SingleEngine",
    "MULTI_CPU": DATA_PARALLEL,
    "MULTI_GPU": DATA_PARALLEL,
    "MULTI_NPU": DATA_PARALLEL,
    "MULTI_MLU": DATA_PARALLEL,
    "MULTI_SDAA": DATA_PARALLEL,
    "MULTI_MUSA": DATA_PARALLEL,
    "MULTI_XPU": DATA_PARALLEL,
    "MULTI_HPU": DATA_PARALLEL,
    "MULTI_NEURON": DATA_PARALLEL,
    "FSDP": "accel_integrations.engines.fsdp1:FSDP1Engine",
    "FSDP2": "accel_integrations.engines.fsdp2:FSDP2Engine",
    "DEEPSPEED": "accel_integrations.engines.deepspeed.engine:DeepSpeedEngine",
    "MEGATRON_LM": "accel_integrations.megatron.engine:MegatronLMEngine",
    "XLA": "accel_integrations.engines.xla:XlaEngine",
}
"""Engine class by distributed type (FSDP has one per version). Other names are looked up among the `accelerate.engines` entry
points of installed packages.
"""

ENTRY_POINTS = "accelerate.engines"

EngineMaker = Callable[[EngineContext], Engine]


def engine_class(distributed_type: DistributedType | str) -> type[Engine]:
    """The engine for a distributed type.

    Raises:
        NotImplementedError: When there is no engine for it; the message lists those that exist.
    """
    name = str(getattr(distributed_type, "value", distributed_type))
    where = ENGINES.get(name)
    if where is not None:
        engine_type: type[Engine] = resolve_name(where)
        return engine_type
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        loaded: type[Engine] = installed[name].load()
        return loaded
    raise NotImplementedError(
        f"The engine {name!r} is not known; there are {', '.join([*ENGINES, *sorted(installed)])}. Leave out the plugin, flag or "
        f"argument that asks for {name}, or install a package that registers an engine of this name in the entry point "
        f"group {ENTRY_POINTS!r}."
    )


_ENGINES: WeakKeyDictionary[nn.Module, ref[Engine]] = WeakKeyDictionary()


def note_engine(model: nn.Module, engine: Engine) -> None:
    """Record which engine has prepared a model."""
    _ENGINES[model] = ref(engine)  # weak: the engine references its models


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that has prepared a model; None when there is none."""
    reference = _ENGINES.get(model)
    return None if reference is None else reference()


def make_engine(context: EngineContext, chosen: str | EngineMaker | None = None) -> Engine:
    """Create the engine of a run and check its settings; it is closed before the process group is destroyed.

    Args:
        context: What engines work with.
        chosen: Its name, or its class or another function that makes it; by the distributed type when None.

    Raises:
        NotImplementedError: When there is none of this name, or for the run's distributed type.
        TypeError: When `chosen` is neither a name nor callable, or makes something else than an engine.
        ValueError: For settings that it cannot combine.
    """
    if chosen is not None and not isinstance(chosen, str) and not callable(chosen):
        raise TypeError(
            f"engine={chosen!r} is neither a name nor a class: give the class, which is called with an EngineContext."
        )
    config = context.state.parallelism_config
    if config is not None and config.pp_enabled:
        engine = _make_pipelined(context, chosen)
    else:
        engine = _maker(_name_of(context) if chosen is None else chosen)(context)
    if not isinstance(engine, Engine):
        raise TypeError(f"engine={chosen!r} made a {type(engine).__name__}, which is no Engine.")
    engine.check()
    shutdown.on_close(engine.close)
    return engine


def _name_of(context: EngineContext) -> str:
    """The name in `ENGINES` of a run's engine.

    A single rank on an accelerator has nobody to average gradients with, and trains as one process does: the buckets of
    `DistributedDataParallel` would hold a second copy of them. On the CPU accelerate 1.15 wraps a single rank, too.
    """
    state = context.state
    trains_alone = state.num_processes == 1 and state.device.type != "cpu"
    return "NO" if trains_alone and ENGINES.get(state.engine_name) == DATA_PARALLEL else state.engine_name


def _maker(chosen: str | EngineMaker) -> EngineMaker:
    return engine_class(chosen) if isinstance(chosen, str) else chosen


def _make_pipelined(context: EngineContext, chosen: str | EngineMaker | None) -> Engine:
    from accel_integrations.engines.pipelined import PipelinedEngine
    from accel_integrations.engines.single import SingleEngine

    replicated = ENGINES.get(context.state.distributed_type.value) == DATA_PARALLEL
    # The pipelined engine averages gradients over replicas itself.
    by_type = SingleEngine if replicated else engine_class(context.state.engine_name)
    inner = by_type if chosen is None else _maker(chosen)
    return PipelinedEngine(inner(context))
