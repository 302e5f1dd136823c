"""An optimizer as checkpoints see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_integrations.prepared.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class WholeOptimizer:
    """An optimizer as that of the whole model would be, however the engine has divided it."""

    engine: Engine
    optimizer: Any
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def collect(cls, engine: Engine, optimizer: Any) -> WholeOptimizer:
        """With its state; all processes must call this."""
        return cls(engine, optimizer, engine.full_optimizer_state(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """The state that was collected."""
        return self.state

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of the state of the whole model's optimizer is for the parameters of this rank."""
        return self.engine.own_optimizer_state(self.optimizer, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give every process its part."""
        self.engine.load_optimizer_state(self.optimizer, state)


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer inside what this library puts around it."""
    while isinstance(optimizer, (WholeOptimizer, AcceleratedOptimizer)):
        optimizer = optimizer.optimizer
    return optimizer
