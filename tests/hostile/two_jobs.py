"""Two jobs save into one project folder at the same time; see what becomes of the checkpoints of both.

Run as a program: `python -m tests.hostile.two_jobs FOLDER`. Prints one JSON object: per scenario, what went wrong. The
jobs are forked from this process, which has imported torch already.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from accelerate.checkpoint.reading import Checkpoint
from tests.support.keeping import make_kept

NUM_SAVES = 25


def save_under_automatic_names(job: int, folder: Path) -> None:
    kept = make_kept(folder, total_limit=3)
    kept.project_configuration.iteration = 100 * job
    for number in range(NUM_SAVES):
        kept.fill(100 * job + number)
        kept.save_state()
        with_limit = [f"checkpoint_{100 * job + last}" for last in range(max(0, number - 2), number + 1)]
        mine = [
            name for name in os.listdir(folder / "checkpoints") if name.startswith("checkpoint_") and is_of(name, job)
        ]
        if sorted(mine) != sorted(with_limit):
            raise RuntimeError(f"after save {number}, job {job} has {sorted(mine)}")


def is_of(name: str, job: int) -> bool:
    return int(name.removeprefix("checkpoint_")) // 100 == job


def save_over_one_folder(job: int, folder: Path) -> None:
    kept = make_kept()
    for number in range(NUM_SAVES):
        kept.fill(100 * job + number)
        kept.save_state(folder / "state")


def save_model_over_one_folder(job: int, folder: Path) -> None:
    kept = make_kept()
    for number in range(NUM_SAVES):
        kept.fill(100 * job + number)
        kept.save_model(kept._models[0], folder / "state", max_shard_size=12)


def check_all(folder: Path) -> None:
    for path in sorted((folder / "checkpoints").iterdir()):
        Checkpoint.open(path).verify()
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    wanted = [f"checkpoint_{100 * job + number}" for job in range(2) for number in range(NUM_SAVES - 3, NUM_SAVES)]
    if names != sorted(wanted):
        raise RuntimeError(f"there are {names}")


def check_state(folder: Path) -> None:
    Checkpoint.open(folder / "state").verify()
    kept = make_kept()
    kept.load_state(folder / "state")
    if len(kept.values()) != 1:
        raise RuntimeError(f"mixed values {kept.values()}")
    check_nothing_is_left(folder)


def check_nothing_is_left(folder: Path) -> None:
    if sorted(os.listdir(folder)) != ["state"]:
        raise RuntimeError(f"left behind: {os.listdir(folder)}")


SCENARIOS: dict[str, tuple[Callable[[int, Path], None], Callable[[Path], None]]] = {
    "automatic names": (save_under_automatic_names, check_all),
    "one folder": (save_over_one_folder, check_state),
    "one model folder": (save_model_over_one_folder, check_nothing_is_left),
}


def stay_until_both_are_done(job: int, folder: Path) -> None:
    """A job that has ended leaves its checkpoints to others."""
    folder.with_name(f"{folder.name}-{job}.done").touch()
    while not (
        folder.with_name(f"{folder.name}-{1 - job}.done").exists()
        or folder.with_name(f"{folder.name}-{1 - job}.error").exists()
    ):
        time.sleep(0.005)


def run(job: Callable[[int, Path], None], check: Callable[[Path], None], folder: Path) -> list[str]:
    """Run two jobs at once; what went wrong in them and after them."""
    folder.mkdir()
    children = {}
    gate, opened = os.pipe()
    for number in range(2):
        child = os.fork()
        if child == 0:
            os.close(opened)
            os.read(gate, 1)  # until both are there
            code = 1
            try:
                warnings.simplefilter("ignore")  # that the other has checkpoints there, too
                job(number, folder)
                code = 0
                stay_until_both_are_done(number, folder)
            except BaseException:
                (folder.parent / f"{folder.name}-{number}.error").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        children[child] = number
    os.close(gate)
    os.close(opened)
    for child in children:
        os.waitpid(child, 0)
    problems = [path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}-*.error"))]
    try:
        check(folder)
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    return problems


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    actual = {name: run(*SCENARIOS[name], folder / str(number)) for number, name in enumerate(names)}
    print(json.dumps(actual))  # noqa: T201


if __name__ == "__main__":
    main()
