"""Show what a config file leads to: the processes, their devices, the mixed precision, and a collective over all of them.

    accelerate launch --config_file single_accelerator.yaml run_me.py
    accelerate launch --config_file multi_gpu.yaml --num_processes 2 run_me.py
    accelerate launch --config_file fsdp.yaml --dry_run run_me.py

A flag of the command line has precedence over the file, and `--dry_run` only prints the settings that would be used, and where each
of them comes from. The last line is the mean squared error of a line that all processes fit together: below 0.01.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    """Print the state of each process, and train for a moment."""
    accelerator = Accelerator()
    state = accelerator.state
    print(
        f"process {state.process_index} of {state.num_processes} on {state.device}: {state.distributed_type.value}, "
        f"mixed precision {state.mixed_precision}",
        flush=True,
    )
    set_seed(0)
    inputs = torch.randn(512, 1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs, 3 * inputs + 1), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(4):
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"final loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
