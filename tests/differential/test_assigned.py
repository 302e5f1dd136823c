"""What programs assign to attributes of ours has the effect that it has with accelerate 1.15."""

from __future__ import annotations

from tests.differential.running import needs_reference, same

pytestmark = needs_reference


def test_assigned_attributes() -> None:
    same("assigned", least=24)
