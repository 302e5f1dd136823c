"""What other libraries' tests import from here."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from accel_state import libraries
from accelerate import PartialState
from accelerate.test_utils import (
    DEFAULT_LAUNCH_COMMAND,
    RegressionDataset,
    RegressionModel,
    are_the_same_tensors,
    assert_exception,
    capture_call_output,
    execute_subprocess_async,
    get_launch_command,
    path_in_accelerate_package,
    require_torch_min_version,
    requirements,
    training,
)
from accelerate.test_utils.testing import (
    AccelerateTestCase,
    MockingTestCase,
    SubprocessCallException,
    TempDirTestCase,
    run_command,
)
from tests.support.ranks import ranks


def outcome(case: type[unittest.TestCase]) -> unittest.TestResult:
    """Run the tests of a class."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def test_every_requirement_skips_with_a_reason_or_runs() -> None:
    names = [name for name in dir(requirements) if name.startswith("require_") or name == "slow"]
    names.remove("require_torch_min_version")  # takes a version
    assert len(names) > 50
    for name in names:
        ran = []

        class Case(unittest.TestCase):
            @getattr(requirements, name)
            def test(self, ran: list[int] = ran) -> None:
                ran.append(1)

        result = outcome(Case)
        assert not result.errors, name
        assert bool(ran) != bool(result.skipped)
        for _, reason in result.skipped:
            assert reason.startswith("needs ")


def test_a_requirement_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "torch_device", "cuda")
    monkeypatch.setattr(requirements, "device_count", 2)
    met = ("cuda", "multi_gpu", "multi_device", "cuda_or_xpu", "non_cpu", "non_xpu")
    unmet = ("cpu", "single_gpu", "single_device", "xpu", "mps", "npu")
    for name in (*met, *unmet):
        decorated: Any = getattr(requirements, f"require_{name}")(lambda: "ran")
        if name in met:
            assert decorated() == "ran"
        else:
            with pytest.raises(unittest.SkipTest, match="needs"):
                decorated()
    assert require_torch_min_version(version="2.0")(lambda: "ran")() == "ran"
    with pytest.raises(unittest.SkipTest, match=r"needs torch 99.0 or later"):
        require_torch_min_version(lambda: "ran", version="99.0")()
    assert libraries.is_torch_version(">=", "2.9")


def test_a_whole_class_can_be_skipped() -> None:
    @requirements.skip
    class Case(unittest.TestCase):
        def test(self) -> None:
            raise AssertionError

    assert len(outcome(Case).skipped) == 1


def test_launch_commands_are_built() -> None:
    words = get_launch_command(num_processes=2, multi_gpu=True, mixed_precision=None)
    assert words == ["accelerate", "launch", "--num_processes=2", "--multi_gpu"]
    assert DEFAULT_LAUNCH_COMMAND[:2] == ["accelerate", "launch"]
    assert path_in_accelerate_package("test_utils", "scripts", "test_script.py").is_file()


def test_commands_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    script = "import sys; print('out', 1); print('err', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    assert run_command([sys.executable, "-c", script, 0]) is None
    text = run_command([sys.executable, "-c", script, 0], return_stdout=True)
    assert text is not None
    assert "out 1" in text
    with pytest.raises(SubprocessCallException, match=r"(?s)exited with code 3.*err"):
        run_command([sys.executable, "-c", script, 3])
    done = execute_subprocess_async([sys.executable, "-c", script, "0"])
    assert (done.returncode, done.stdout, done.stderr) == (0, ["out 1"], ["err"])
    assert "out 1" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"(?s)exited with code 4.*err"):
        execute_subprocess_async([sys.executable, "-c", script, "4"], quiet=True, echo=False)
    assert "out 1" not in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"killed after 0.1 s"):
        execute_subprocess_async([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)


def test_errors_are_expected() -> None:
    with assert_exception(ValueError, "abc"):
        raise ValueError("x abc x")
    with pytest.raises(AssertionError, match="none was raised"), assert_exception(ValueError):
        pass
    with pytest.raises(AssertionError, match="does not contain 'abc'"), assert_exception(ValueError, "abc"):
        raise ValueError("other")
    assert capture_call_output(print, "hi", 3, sep="-") == "hi-3\n"


def test_base_classes_clean_up() -> None:
    seen: list[Any] = []

    class Case(TempDirTestCase, MockingTestCase, AccelerateTestCase):
        def setUp(self) -> None:
            super().setUp()
            self.add_mocks(mock.patch.dict("os.environ", {"ONLY_HERE": "1"}))

        def test_one(self) -> None:
            self._look()

        def test_two(self) -> None:
            self._look()

        def _look(self) -> None:
            import os

            PartialState(cpu=True)
            seen.append((list(self.tmpdir.iterdir()), os.environ["ONLY_HERE"], self.tmpdir))
            (self.tmpdir / "file").write_text("x")
            (self.tmpdir / "folder").mkdir()

    result = outcome(Case)
    assert result.testsRun == 2
    assert not result.errors
    assert [entry[:2] for entry in seen] == [([], "1"), ([], "1")]
    assert not Path(seen[0][2]).exists()
    assert PartialState._shared_state == {}


def test_data_and_models_are_known() -> None:
    points = RegressionDataset(2, 3, length=4, seed=5)
    assert len(points) == points.length == 4
    np.testing.assert_allclose(points[0]["x"], -0.80193144)
    np.testing.assert_allclose(points[0]["y"], 1.5097418, rtol=1e-6)
    model = RegressionModel(2, 3)
    assert torch.equal(model(torch.tensor([1.0, 2.0])), torch.tensor([5.0, 7.0]))
    assert len(RegressionModel(double_output=True)(torch.ones(1))) == 2
    train, check = training.mocked_dataloaders(None, 8)
    batch = next(iter(train))
    assert batch["input_ids"].shape == (8, 32)
    assert batch["labels"].shape == (8,)
    assert len(check) == 8
    train, _ = training.mocked_dataloaders_for_autoregressive_models(None)
    batch = next(iter(train))
    assert torch.equal(batch["labels"], batch["input_ids"])


@ranks(2)
def test_tensors_are_compared_between_processes(rank: int, world: int) -> None:
    PartialState(cpu=True)
    assert are_the_same_tensors(torch.ones(3))
    assert not are_the_same_tensors(torch.tensor([float(rank)]))
