"""Running the grid: one launch for each configuration, after one process that is the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field

from accel_cli.errors import UsageError, did_you_mean
from accel_cli.grid.compare import TOLERANCE, GridRun, compare, read_facts, read_run
from accel_cli.grid.observe import Observation
from accel_cli.launch.unconfigured import unconfigured

REFERENCE = "one process"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the grid.

    Attributes:
        name: As `--only` takes it.
        ranks: How many processes are launched.
        flags: For `accelerate launch`, separated by blanks; `{num_steps}` and `{max_norm}` are what one process used.
        library: What must be installed for it; empty for nothing.
        needs_blocks: Whether the script must shard its buffers in `maybe_context_parallel`.
    """

    name: str
    ranks: int
    flags: str = ""
    library: str = ""
    needs_blocks: bool = False


# Small units, so that even a small model is sharded in several.
FSDP = "--use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 1000 --fsdp_version"
# DeepSpeed clips and counts micro-batches itself.
ZERO = (
    "--use_deepspeed --gradient_accumulation_steps {num_steps} --gradient_clipping {max_norm} --zero3_init_flag false "
    "--zero_stage"
)


def _mesh(**sizes: int) -> str:
    return " ".join(["--use_parallelism_config", *(f"--parallelism_config_{k}_size {n}" for k, n in sizes.items())])


def _data_parallel(name: str, flags: str, *ranks: int, library: str = "") -> tuple[Configuration, ...]:
    return tuple(Configuration(f"{name}-{count}", count, flags, library) for count in ranks)


CONFIGURATIONS = (
    *_data_parallel("ddp", "", 2, 3, 4),
    *_data_parallel("fsdp1", f"{FSDP} 1", 2, 3),
    *_data_parallel("fsdp2", f"{FSDP} 2", 1, 2, 3, 4),
    *_data_parallel("zero1", f"{ZERO} 1", 2, library="deepspeed"),
    *_data_parallel("zero2", f"{ZERO} 2", 2, 3, library="deepspeed"),
    *_data_parallel("zero3", f"{ZERO} 3", 2, 3, library="deepspeed"),
    Configuration("tp-2", 2, _mesh(tp=2)),
    Configuration("tp-4", 4, _mesh(tp=4)),
    Configuration("cp-2", 2, _mesh(cp=2), needs_blocks=True),
    Configuration("sp-2", 2, f"{_mesh(sp=2)} --parallelism_config_sp_backend torch"),
    Configuration("sp-4", 4, f"{_mesh(sp=4)} --parallelism_config_sp_backend torch"),
    Configuration("pp-2", 2, _mesh(pp=2)),
    Configuration("pp-4", 4, _mesh(pp=4)),
    Configuration("hsdp-4", 4, f"{_mesh(dp_replicate=2, dp_shard=2)} {FSDP} 2"),
    Configuration("fsdp2-tp-4", 4, f"{_mesh(dp_shard=2, tp=2)} {FSDP} 2"),
    Configuration("fsdp2-cp-4", 4, f"{_mesh(dp_shard=2, cp=2)} {FSDP} 2", needs_blocks=True),
    Configuration("ddp-pp-4", 4, _mesh(dp_replicate=2, pp=2)),
)  # fmt: skip


def chosen(names: str | None) -> tuple[Configuration, ...]:
    """The rows that `--only` names.

    Args:
        names: Separated by commas; None for all rows.

    Raises:
        UsageError: There is no row of a name.
    """
    if names is None:
        return CONFIGURATIONS
    rows = {row.name: row for row in CONFIGURATIONS}
    listed = [name.strip() for name in names.split(",") if name.strip()]
    for name in listed or [names]:
        if name not in rows:
            raise UsageError(
                f"--only {names}: there is no configuration {name!r}.{did_you_mean(name, list(rows))} Choose from {', '.join(rows)}."
            )
    return tuple(rows[name] for name in dict.fromkeys(listed))


OK, DIFFERS, FAILED, NOT_RUN = "ok", "differs", "failed", "not run"
HEADS = ("configuration", "ranks", "loss", "gradient norm", "update", "seconds", "")


@dataclass(frozen=True, slots=True)
class GridRow:
    """The result of one configuration.

    Attributes:
        name: Of the configuration.
        ranks: How many.
        status: `OK`, `DIFFERS`, `FAILED` or `NOT_RUN`.
        reason: In a sentence; empty where it is `OK`.
        errors: The largest relative differences, by figure; empty where nothing was compared.
        seconds: How long the launch took.
    """

    name: str
    ranks: int
    status: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def cells(self) -> tuple[str, ...]:
        """One for each of `HEADS`."""
        figures = [f"{self.errors[name]:.1e}" if self.errors else "" for name in ("loss", "norm", "update")]
        result = f"{self.status}: {self.reason}" if self.reason else self.status
        return (self.name, str(self.ranks), *figures, f"{self.seconds:.0f}", result)


WIDTHS = (max(len("configuration"), 13), 5, 8, 13, 8, 7, 0)


def line(cells: tuple[str, ...]) -> str:
    """A line of the table, whose widths are fixed, so that each can be printed as soon as it is known."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def run_grid(words: list[str], only: str | None = None) -> int:
    """Run a script in each configuration, and print how far its figures are from those of one process.

    Args:
        words: The script and its arguments.
        only: Names of configurations, separated by commas; all of them when None.

    Returns:
        The exit status for the shell: 1 if a configuration disagrees or fails.

    Raises:
        UsageError: There is no such script or configuration, or the script takes no step in one process.
    """
    rows = chosen(only)
    if not os.path.isfile(words[0]):
        raise UsageError(
            f"The script {words[0]!r} does not exist. Pass a Python file: accelerate test --grid train.py."
        )
    with tempfile.TemporaryDirectory(prefix="accelerate-grid-") as folder:
        reference = _reference(folder, words)
        print(line(HEADS), flush=True)
        counts: Counter[str] = Counter()
        for configuration in rows:
            row = _result(configuration, folder, words, reference)
            counts[row.status] += 1
            print(line(row.cells()), flush=True)
    print(
        f"{', '.join(f'{counts[name]} {name}' for name in (OK, DIFFERS, FAILED, NOT_RUN))} (tolerance {TOLERANCE:.0e})"
    )
    return 1 if counts[DIFFERS] + counts[FAILED] else 0


def _reference(folder: str, words: list[str]) -> GridRun:
    records, status, said = _launch(Configuration(REFERENCE, 1), folder, words, "")
    if status:
        print(said, file=sys.stderr)
        raise UsageError(f"{words[0]} fails in one process, with exit status {status}; its output is above.")
    run = read_run(records)
    if not run.losses:
        raise UsageError(
            f"{words[0]} took no optimizer step in one process. The grid needs a script that trains by accelerator.backward(loss) "
            "and the step() of a prepared optimizer."
        )
    return run


def _result(configuration: Configuration, folder: str, words: list[str], reference: GridRun) -> GridRow:
    name, ranks = configuration.name, configuration.ranks
    lacking = _lacking(configuration, reference)
    if lacking:
        return GridRow(name, ranks, NOT_RUN, lacking)
    start = time.monotonic()
    flags = configuration.flags.format(**reference.facts)
    records, status, said = _launch(configuration, folder, words, flags)
    seconds = time.monotonic() - start
    if status:
        facts = read_facts(records)
        error = next((one["error"] for one in facts if "error" in one), f"exit status {status}")
        reason = " ".join(error.split())
        if facts and not any(one["began"] for one in facts):
            return GridRow(name, ranks, NOT_RUN, reason, seconds=seconds)
        print(said, file=sys.stderr)
        return GridRow(name, ranks, FAILED, reason, seconds=seconds)
    comparison = compare(read_run(records), reference)
    return GridRow(name, ranks, DIFFERS if comparison.reason else OK, comparison.reason, comparison.errors, seconds)


def _lacking(configuration: Configuration, reference: GridRun) -> str:
    """Why a configuration cannot run the script; empty if it may."""
    from accel_state.libraries import is_installed

    if configuration.library and not is_installed(configuration.library):
        return f"{configuration.library} is not installed"
    if configuration.needs_blocks and not reference.facts["has_blocks"]:
        return "the script has no `with accelerator.maybe_context_parallel(...)`"
    return ""


def _launch(configuration: Configuration, folder: str, words: list[str], flags: str) -> tuple[str, int, str]:
    """Launch the script in one configuration.

    Returns:
        The folder with the records of its ranks, the exit status, and what was printed.
    """
    records = os.path.join(folder, configuration.name.replace(" ", "-"))
    os.mkdir(records)
    observed = ["--module", "accel_cli.grid.observe", json.dumps(asdict(Observation(records))), *words]
    with unconfigured() as (config_file, environment):
        launch = ["-m", "accel_cli.main", "launch", "--config_file", config_file, "--cpu", "--main_process_port", "0"]
        launch += ["--num_machines", "1", "--num_processes", str(configuration.ranks), *flags.split()]
        # one thread, so that every configuration adds numbers in the same order
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
        done = subprocess.run(
            [sys.executable, *launch, *observed],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    return records, done.returncode, done.stdout
