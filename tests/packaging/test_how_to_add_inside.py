"""What docs/architecture.md says about adding things inside: one file and one row each, in a copy of the packages."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.packaging.test_how_to_add import run

OUTSIDE = Path(__file__).with_name("outside") / "outside"
PACKAGES = (
    "accel_state", "accel_ops", "accel_data", "accel_bigmodel", "accel_tracking", "accel_integrations", "accel_cli", "accelerate",
)  # fmt: skip
FILES = {
    "engine.py": "accel_integrations/engines/counting.py",
    "precision.py": "accel_integrations/precision/double.py",
    "tracker.py": "accel_tracking/trackers/printing.py",
    "command.py": "accel_cli/greet.py",
}
ROWS = (
    # file, the line before the new one, the new one
    (
        "accel_integrations/engines/registry.py",
        "ENGINES: dict[str, str] = {",
        '    "COUNTING": "accel_integrations.engines.counting:CountingEngine",',
    ),
    ("accel_state/enums.py", '    BF16 = "bf16"\n    FP8 = "fp8"', '    DOUBLE = "double"'),
    (
        "accel_integrations/precision/registry.py",
        "PRECISIONS = {",
        '    "double": "accel_integrations.precision.double:DoublePrecision",',
    ),
    (
        "accel_tracking/registry.py",
        "SERVICES: dict[str, Service] = {",
        '    "printing": Service("accel_tracking.trackers.printing", "PrintingTracker"),',
    ),
    ("accel_cli/main.py", "_COMMANDS = (", '    Command("greet", "accel_cli.greet", "Greet somebody."),'),
    (
        "accel_state/devices.py",
        "DEVICE_KINDS: tuple[DeviceKind, ...] = (",
        '    DeviceKind("toy", DistributedType.MULTI_GPU, "toyccl", "TOY_VISIBLE_DEVICES", bf16=True),',
    ),
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which copies of the packages come first, with one thing of each kind more."""
    site = tmp_path_factory.mktemp("site")
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, target in FILES.items():
        shutil.copy(OUTSIDE / name, site / target)
    for name, before, row in ROWS:
        text = (site / name).read_text()
        assert text.count(f"{before}\n") == 1, f"{name} has changed; so has docs/architecture.md?"
        (site / name).write_text(text.replace(f"{before}\n", f"{before}\n{row}\n"))
    script = (OUTSIDE / "train.py").read_text()
    script = script.replace("from outside.options import ToyOptions\n", "").replace("ToyOptions().speed", "7")
    script = script.replace("Accelerator(", 'Accelerator(engine="COUNTING", ')
    (site / "train.py").write_text(script)
    (site / "place.py").write_text((OUTSIDE / "place.py").read_text())
    shutil.copytree(OUTSIDE, site / "outside")
    return {**os.environ, "PYTHONPATH": str(site), "ACCELERATE_CONFIG_FILE": str(site / "none"), "SITE": str(site)}


@pytest.mark.takes_turns
@pytest.mark.launch
def test_an_engine_a_precision_and_a_tracker(environment: dict[str, str], tmp_path: Path) -> None:
    chosen = ["--cpu", "--num_processes", "2", "--mixed_precision", "double"]
    script = os.path.join(environment["SITE"], "train.py")
    printed = run(environment, "launch", *chosen, script, str(tmp_path / "state"))
    assert "engine counting 3" in printed
    assert "precision double torch.float64 torch.float32" in printed
    assert "tracker run 2 {'loss': 1.0}" in printed


def test_a_command_and_a_device(environment: dict[str, str]) -> None:
    assert run(environment, "greet", "you") == "hello you\n"
    script = os.path.join(environment["SITE"], "place.py")
    assert "device toy NO" in run(environment, "launch", "--num_processes", "1", script)
