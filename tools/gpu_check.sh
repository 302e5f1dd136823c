#!/usr/bin/env bash
# The whole check of one GPU: the tests that are skipped without one, then the figures for docs/performance.md.
# For 9 minutes of one H100; how long it took is printed. Run it as: uv run bash tools/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python -c "import torch; assert torch.cuda.is_available(), 'this machine has no GPU'; print(torch.cuda.get_device_name(0))" || exit 2
begin=$SECONDS
failed=0
python -m pytest -q -n0 -p no:randomly -m gpu tests/gpu || failed=1
echo "--- tests: $((SECONDS - begin)) s"
PYTHONPATH=. python tools/bench/gpu.py || failed=1
echo "--- tests and figures: $((SECONDS - begin)) s"
exit $failed
