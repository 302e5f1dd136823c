"""The section fp8_config of a config file, as accelerate 1.15 documents it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_cli.main import main

SECTION = """distributed_type: 'NO'
mixed_precision: fp8
use_cpu: true
num_processes: 1
fp8_config:
  amax_compute_algorithm: max
  amax_history_length: 1024
  backend: TE
  fp8_format: E4M3
  interval: 1
  margin: 0
  override_linear_precision: {value}
  use_autocast_during_eval: false
"""


def dry_run(folder: Path, value: str) -> int:
    (folder / "fp8.yaml").write_text(SECTION.format(value=value))
    (folder / "train.py").touch()
    return main(["launch", "--dry_run", "--config_file", str(folder / "fp8.yaml"), str(folder / "train.py")])


@pytest.mark.parametrize(
    ("value", "bits"),
    [("false", "000"), ("true", "111"), ("[true, false, true]", "101"), ("[false, false, false]", "000")],
)
def test_one_bool_stands_for_all_three_passes(
    tmp_path: Path, value: str, bits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(tmp_path, value) == 0
    command = capsys.readouterr().out
    for name, bit in zip(("FPROP", "DGRAD", "WGRAD"), bits, strict=True):
        assert f"ACCELERATE_FP8_OVERRIDE_{name}={bit}" in command


@pytest.mark.parametrize("value", ["[true, true]", "nope"])
def test_anything_else_is_named(tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path, value) == 2
    said = capsys.readouterr().err
    assert "fp8_config.override_linear_precision" in said
    assert "one bool, or three" in said
