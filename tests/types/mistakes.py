"""Values that no run accepts: a type checker marks the lines that end in `# wrong`, and no others."""

from __future__ import annotations

from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin

accelerator = Accelerator(mixed_precision="fp16")
Accelerator(mixed_precision="fp17")  # wrong
FullyShardedDataParallelPlugin(fsdp_version=2)
FullyShardedDataParallelPlugin(fsdp_version=3)  # wrong
layer = accelerator.prepare(nn.Linear(2, 2))
accelerator.unwrap_model(layer).out_features.upper()  # wrong
first, second = accelerator.prepare(layer, layer, layer)  # wrong
accelerator.reduce(layer.weight, "average")  # wrong
