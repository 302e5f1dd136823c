"""When torch_xla is used, and how it is launched."""

from __future__ import annotations

from pathlib import Path

from tests.xla.running import needs_torch_xla, run

pytestmark = needs_torch_xla

AS_BEFORE = """
import os, sys
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(2, 2))
assert "torch_xla" not in sys.modules, "it was imported"
print(accelerator.device, accelerator.distributed_type.value, next(model.parameters()).device)
import torch_xla
assert os.environ["PJRT_DEVICE"] == "CPU"  # which it sets itself
accelerator.state._reset_state(reset_partial_state=True)
print(Accelerator().device)
"""

IMPORTED_FIRST = """
import torch_xla
from accelerate import Accelerator
print(Accelerator().device)
"""

SCRIPT = """
import torch
from accelerate import Accelerator

def main():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    import torch_xla.runtime as xr
    print("trains on", accelerator.device, accelerator.num_processes, xr.is_spmd(), accelerator.mixed_precision)
    print("rounds", torch.tensor([1.0009765625], device=accelerator.device).item() == 1.0)

if __name__ == "__main__":
    raise SystemExit("is called, not run")
"""


def test_a_machine_that_merely_has_the_library_trains_as_before() -> None:
    done = run("-c", AS_BEFORE)
    assert done.stdout.splitlines() == ["cpu NO cpu", "cpu"], done.stderr


def test_the_variable_that_the_user_has_set_is_known_also_when_torch_xla_was_imported_first() -> None:
    assert run("-c", IMPORTED_FIRST, PJRT_DEVICE="CPU").stdout.strip() == "xla:0"
    assert run("-c", IMPORTED_FIRST).stdout.strip() == "cpu"


def test_launching_on_the_cores_of_this_machine(tmp_path: Path) -> None:
    script = tmp_path / "train_on_xla.py"
    script.write_text(SCRIPT)
    words = ("-m", "accelerate.commands.launch", "--tpu", "--mixed_precision", "bf16", str(script))
    done = run(*words, PJRT_DEVICE="CPU")
    assert done.stdout.splitlines()[-2:] == ["trains on xla:0 1 False bf16", "rounds False"], done.stderr
    done = run(*words, PJRT_DEVICE="CPU", XLA_USE_SPMD="1", CPU_NUM_DEVICES="2")
    assert done.stdout.splitlines()[-2:] == ["trains on xla:0 1 True bf16", "rounds False"], done.stderr
