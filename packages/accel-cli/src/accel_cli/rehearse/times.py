"""The time of a step, from a rehearsal's figures and a device's."""

from __future__ import annotations

from dataclasses import dataclass

from accel_cli.rehearse.devices import Device
from accel_cli.rehearse.result import Exchange, Result

ASSUMPTIONS = (
    "assumed: kernels reach the peak or the bandwidth of the data sheet, each reads and writes memory (nothing is fused), collectives "
    "go by rings, those of data parallelism run beside computing, and neither the host nor the network adds latency"
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one step, in seconds.

    Attributes:
        computing: The roofline of all operations.
        in_background: Collectives that may run beside it.
        waited_for: Collectives that computing waits for.
        mfu: FLOPs over what the device could have done in the step, from 0 to 1.
    """

    computing: float
    in_background: float
    waited_for: float
    mfu: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return max(self.computing, self.in_background) + self.waited_for


def seconds_of(exchange: Exchange, device: Device) -> float:
    """The time of one kind of collective: at the bandwidth between machines, if its ranks are on several."""
    return exchange.seconds(device.inter_gbps if exchange.between_machines else device.intra_gbps)


def step_time(result: Result, device: Device) -> StepTime:
    """Compute the time of a step."""
    background = sum(seconds_of(exchange, device) for exchange in result.exchanges if exchange.in_background)
    waited_for = sum(seconds_of(exchange, device) for exchange in result.exchanges if not exchange.in_background)
    total = max(result.seconds, background) + waited_for
    return StepTime(result.seconds, background, waited_for, result.shortest_seconds / total if total else 0.0)
