#!/usr/bin/env bash
# Everything that needs one real GPU, in at most 8 minutes of one H100 or H200: the figures alone; then the tests of
# tests/gpu and the short run of all tests side by side; then, alone, the tests that fill the GPU.
#
#   uv run bash tools/gpu_check.sh [FOLDER] [REFERENCE]     # or without uv, with PYTHON=... for another interpreter
#
# FOLDER (default ./gpu-check, ignored by git) gets figures.md, a Markdown table that grows with each figure, log.txt with what
# each stage came to and what was skipped, and the output of each stage. REFERENCE is an interpreter that has accelerate 1.15,
# or a folder with it; without one it is looked for. Exits with 0 when all stages passed and all goals were met.
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
FOLDER="${1:-$ROOT/gpu-check}"
REFERENCE="${2:-${REFERENCE:-}}"
TOTAL_SECONDS="${TOTAL_SECONDS:-480}"
PYTHON="${PYTHON:-$(command -v python || command -v python3)}"

absolute() { # the path of a file or folder, which stays right when the working folder changes; links are not followed
  if [[ $1 == */* && -e $1 ]]; then echo "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"; else echo "$1"; fi
}

PYTHON="$(absolute "$PYTHON")"
REFERENCE="$(absolute "$REFERENCE")"
mkdir -p "$FOLDER" || exit 2
FOLDER="$(cd "$FOLDER" && pwd)"
echo '*' >"$FOLDER/.gitignore"
LOG="$FOLDER/log.txt"
: >"$LOG"
BEGIN=$SECONDS
failed=()
cd "$ROOT" || exit 2

say() { echo "$*" | tee -a "$LOG"; }

has() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }

version_of_accelerate() { # of an interpreter, with the folders that come first on its path
  (cd / && PYTHONPATH="$2" "$1" -c "import accelerate; print(accelerate.__version__)" 2>/dev/null)
}

write_metadata() { # what an installation would leave: other libraries ask for versions, the command for entry points
  "$PYTHON" - "$1" <<'PROGRAM'
import sys, tomllib
from pathlib import Path
for path in Path("packages").glob("*/pyproject.toml"):
    project = tomllib.loads(path.read_text())["project"]
    name, version = project["name"], project["version"]
    folder = Path(sys.argv[1], f"{name.replace('-', '_')}-{version}.dist-info")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items()) for group, points in groups.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines))
PROGRAM
}

# stage NAME LIMIT COMMAND...: run it with a time limit and a log of its own; the script goes on, whatever it comes to.
stage() {
  local name="$1" limit="$2" left begin=$SECONDS code
  shift 2
  left=$((TOTAL_SECONDS - SECONDS + BEGIN))
  if ((left < 10)); then
    say "SKIPPED $name: no time left"
    return 1
  fi
  # An interrupt makes pytest say what has failed so far; bash has its background jobs ignore interrupts.
  timeout --signal=INT --kill-after=15 "$((limit < left ? limit : left))" env --default-signal=INT "$@" \
    >"$FOLDER/$name.txt" 2>&1 </dev/null
  code=$?
  say "$([[ $code == 0 ]] && echo passed || echo FAILED) $name: exit code $code after $((SECONDS - begin)) s$(summary "$name" $code)"
  return $code
}

summary() { # the last line of pytest's output, if it is one, or that the time limit was reached
  [[ $2 == 124 || $2 == 137 ]] && echo -n "; stopped at its time limit"
  local line
  line="$(grep -E '[0-9]+ (passed|failed|error|skipped)' "$FOLDER/$1.txt" | tail -n 1 | tr -d '=')"
  [[ -n $line ]] && echo -n "; ${line# }"
}

# ---- what is here --------------------------------------------------------------------------------------------------

given_path="${PYTHONPATH:-}"
sources="$(printf '%s:' "$ROOT"/packages/*/src)"
if [[ "$(version_of_accelerate "$PYTHON" "$given_path")" != "$(version_of_accelerate "$PYTHON" "$sources$given_path")" ]] || ! has accel_state; then
  [[ -z $REFERENCE && "$(version_of_accelerate "$PYTHON" "$given_path")" == 1.15.* ]] && REFERENCE="$PYTHON"
  say "the packages of this repository are not installed: they are taken from packages/*/src"
  write_metadata "$FOLDER/metadata" || exit 2
  export PYTHONPATH="$ROOT:$sources$FOLDER/metadata${given_path:+:$given_path}"
else
  export PYTHONPATH="$ROOT${given_path:+:$given_path}"
fi
[[ -z $REFERENCE && -x .venv-reference/bin/python ]] && REFERENCE="$ROOT/.venv-reference/bin/python"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$PYTHON" - <<'PROGRAM' 2>&1 | tee -a "$LOG"
import platform, sys
import torch
if not torch.cuda.is_available():
    sys.exit("this machine has no GPU that torch can use")
print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
PROGRAM
[[ ${PIPESTATUS[0]} == 0 ]] || exit 2
command -v nvidia-smi >/dev/null && say "driver $(nvidia-smi --query-gpu=driver_version,memory.total,memory.used --format=csv,noheader | head -n 1)"
say "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(nproc) cores, at most $TOTAL_SECONDS s"
for library in transformers deepspeed bitsandbytes torchao; do
  has "$library" || say "SKIPPED tests and figures of $library: not installed"
done

# ---- the figures, alone ----------------------------------------------------------------------------------------------

figures=("$PYTHON" -m tools.bench.gpu --output "$FOLDER/figures.md" --seconds 270)
if [[ -n $REFERENCE ]]; then
  figures+=(--reference "$REFERENCE")
else
  say "SKIPPED the figures of accelerate 1.15: not installed"
fi
stage figures 300 "${figures[@]}" || failed+=(figures)

# ---- tests, side by side ---------------------------------------------------------------------------------------------

# Replaces the options of pyproject.toml, which need pytest-xdist; plugins that are not there cannot be switched off wrongly.
pytest=("$PYTHON" -m pytest -q -p no:benchmark -p no:cacheprovider -p no:randomly
  -o "addopts=--strict-markers -ra --import-mode=importlib --durations=10")
few=() many=()
if has xdist; then
  few=(-n 3) many=(-n "$(($(nproc) > 8 ? $(nproc) - 4 : 4))")
else
  say "pytest-xdist is not installed: tests run one after the other"
fi
if ! has pytest_randomly; then # tests/conftest.py names it; nothing else needs it
  mkdir -p "$FOLDER/stand-ins"
  echo 'entrypoint_reseeds = []' >"$FOLDER/stand-ins/pytest_randomly.py"
  export PYTHONPATH="$PYTHONPATH:$FOLDER/stand-ins"
fi
if has pytest && has hypothesis; then
  export OMP_NUM_THREADS=1
  stage tests-gpu 150 "${pytest[@]}" "${few[@]}" -m gpu tests/gpu &
  on_gpu=$!
  stage tests-short 150 "${pytest[@]}" "${many[@]}" -m "not gpu" &
  short=$!
  wait "$on_gpu" || failed+=(tests-gpu)
  wait "$short" || failed+=(tests-short)

  # ---- what fills the GPU, alone -------------------------------------------------------------------------------------

  TESTS_FILL_GPU=1 stage tests-full-gpu 30 "${pytest[@]}" -m gpu tests/gpu/test_one_gpu.py -k "gpu_is_full" ||
    failed+=(tests-full-gpu)
else
  say "SKIPPED all tests: they need pytest and hypothesis"
  failed+=(tests)
fi

# ---- the sum ---------------------------------------------------------------------------------------------------------

for output in "$FOLDER"/tests-*.txt; do
  [[ -e $output ]] && grep -hE '^(FAILED|ERROR|SKIPPED)' "$output" >>"$LOG"
done
say "figures: $FOLDER/figures.md"
say "$((SECONDS - BEGIN)) s in all; failed: ${failed[*]:-nothing}"
((${#failed[@]} == 0))
