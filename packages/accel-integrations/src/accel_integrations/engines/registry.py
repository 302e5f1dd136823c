"""The one table that names engine classes."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from accel_integrations.engines.engine import Engine, EngineContext
from accel_state.enums import DistributedType

ENGINES: dict[str, str] = {
    "NO": "accel_integrations.engines.single:SingleEngine",
    "MULTI_CPU": "accel_integrations.engines.ddp:DDPEngine",
    "MULTI_GPU": "accel_integrations.engines.ddp:DDPEngine",
    "MULTI_NPU": "accel_integrations.engines.ddp:DDPEngine",
    "MULTI_MLU": "accel_integrations.engines.ddp:DDPEngine",
    "MULTI_SDAA": "accel_integrations.engines.ddp:DDPEngine",
    "MULTI_MUSA": "accel_integrations.engines.ddp:DDPEngine",
    "MULTI_XPU": "accel_integrations.engines.ddp:DDPEngine",
    "MULTI_HPU": "accel_integrations.engines.ddp:DDPEngine",
    "MULTI_NEURON": "accel_integrations.engines.ddp:DDPEngine",
}
"""Engine class by the distributed type of the run. Types that are missing are looked for among the
`accelerate.engines` entry points of installed packages, which bear the same names."""

ENTRY_POINTS = "accelerate.engines"


def engine_class(distributed_type: DistributedType | str) -> type[Engine]:
    """The engine for a distributed type.

    Raises:
        NotImplementedError: When no engine is known for it, naming those there are.
    """
    name = str(getattr(distributed_type, "value", distributed_type))
    where = ENGINES.get(name)
    if where is not None:
        module, _, attribute = where.partition(":")
        found: type[Engine] = getattr(import_module(module), attribute)
        return found
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        loaded: type[Engine] = entry.load()
        return loaded
    raise NotImplementedError(
        f"This release has no engine for distributed_type={name!r}: it trains on one process and with data parallel "
        f"replicas ({', '.join(ENGINES)}). Leave the plugin for {name} out, or install a package that registers an "
        f"engine of this name in the entry point group {ENTRY_POINTS!r}."
    )


def make_engine(context: EngineContext) -> Engine:
    """The engine of a run, checked before anything is prepared.

    Raises:
        NotImplementedError: When there is none for the run's distributed type.
        ValueError: For settings that it cannot combine.
    """
    engine = engine_class(context.state.distributed_type)(context)
    engine.check()
    return engine
