"""Full precision: nothing is converted."""

from __future__ import annotations

from typing import final

from accel_integrations.precision.precision import Precision


@final
class FullPrecision(Precision):
    """Computes in the dtype that parameters have."""

    name = "no"
