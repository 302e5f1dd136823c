#!/usr/bin/env bash
# All checks that need a GPU, in one go: the tests that are skipped without one, then the figures.
# uv run bash tools/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python -c "import torch; assert torch.cuda.is_available(), 'this machine has no GPU'; print(torch.cuda.get_device_name(0))"
python -m pytest -q -m gpu
PYTHONPATH=. python tools/bench/gpu.py
