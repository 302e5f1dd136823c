"""Run by the launch tests: says where it is, and fails when asked to."""

import json
import os
import sys

import torch

from accelerate import Accelerator
from accelerate.utils import gather_object

accelerator = Accelerator()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)) if accelerator.use_distributed else None
if model is not None:
    model(torch.ones(1, 2)).sum().backward()
if "fail" in sys.argv and accelerator.process_index == 1:
    sys.exit(3)
places = gather_object([[accelerator.process_index, str(accelerator.device), os.environ.get("LOCAL_RANK")]])
if accelerator.is_main_process:
    said = {"places": places, "precision": accelerator.mixed_precision, "argv": sys.argv[1:]}
    print(json.dumps(said), flush=True)  # noqa: T201 - the tests read it
# ends without end_training, with the model alive
