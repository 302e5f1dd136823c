"""Base classes for tests of unittest."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any

from accel_state.accelerator_state import AcceleratorState
from accel_state.processes import PartialState


class AccelerateTestCase(unittest.TestCase):
    """Resets `AcceleratorState` and `PartialState` after each test."""

    def tearDown(self) -> None:
        """Reset the states."""
        super().tearDown()
        AcceleratorState._reset_state()
        PartialState._reset_state()


class TempDirTestCase(unittest.TestCase):
    """Has a folder of its own, `tmpdir`, that is removed after the last test.

    Attributes:
        clear_on_setup (`bool`): Whether it is emptied before each test.
    """

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Make the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class MockingTestCase(unittest.TestCase):
    """Starts patches with each test and stops them after it."""

    def add_mocks(self, mocks: Any) -> None:
        """Start patches of `unittest.mock`.

        Args:
            mocks: One, or several.
        """
        self.mocks = list(mocks) if isinstance(mocks, (tuple, list)) else [mocks]
        for mock in self.mocks:
            mock.start()
            self.addCleanup(mock.stop)
