"""Megatron-LM without megatron-core; with it, see `tests/megatron`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from accel_state.errors import MissingLibraryError
from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")


@ranks(2)
def test_a_missing_library_is_named_with_how_to_install_it(rank: int, world: int) -> None:
    with pytest.raises(MissingLibraryError, match=r"MegatronLMPlugin needs .*pip install megatron-core"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
