"""DeepSpeed's own launchers on two machines, by ssh and a hostfile."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.clusters.ssh_machines import HOSTS, Machines, lacks, ssh_machines
from tests.support.machines import ADDRESSES

pytestmark = [
    pytest.mark.launch,
    pytest.mark.thorough,
    pytest.mark.skipif(bool(lacks()), reason=lacks() or "machines can be started"),
]

TRAINS = """
import json, os
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import gather_object

accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.0))
model = torch.nn.Linear(2, 1)
torch.nn.init.zeros_(model.weight)
torch.nn.init.zeros_(model.bias)
loader = torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
where = gather_object([(os.uname().nodename, accelerator.local_process_index, os.environ.get("GIVEN"))])
if accelerator.is_main_process:
    print(json.dumps({"where": where, "bias": model.module.bias.item()}))
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with ssh_machines(tmp_path_factory.mktemp("machines")) as started:
        (started.folder / "train.py").write_text(TRAINS)
        yield started


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("pdsh", marks=pytest.mark.skipif(bool(lacks("pdsh")), reason=lacks("pdsh"))),
        pytest.param("openmpi", marks=pytest.mark.skipif(bool(lacks("ompi_info")), reason=lacks("ompi_info"))),
    ],
)
def test_both_machines_of_a_hostfile_train_one_model(launcher: str, machines: Machines) -> None:
    pytest.importorskip("deepspeed")
    hosts = "--num_machines 2 --num_processes 2 --deepspeed_hostfile hosts"
    words = f"--cpu --use_deepspeed {hosts} --deepspeed_multinode_launcher {launcher} --main_process_ip {ADDRESSES[0]}"
    done = machines.run(f"env GIVEN=here accelerate launch {words} train.py")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if '"where"' in line)
    result = json.loads(line[line.index("{") :])
    assert result["where"] == [[HOSTS[0], 0, "here"], [HOSTS[1], 0, "here"]], "the variables reach both"
    assert result["bias"] == pytest.approx(-0.4), "four steps of 0.1 against a gradient of 1"
