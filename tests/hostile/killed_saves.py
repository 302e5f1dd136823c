"""Kill a saving process at every single step it takes, and see what can be loaded afterwards.

Run as a program: `python -m tests.hostile.killed_saves FOLDER`. Prints one JSON object: per scenario, at how many steps
a process was killed and what was found wrong. Processes are forked from this one, which has imported torch already.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_ops.files import staging
from accel_ops.files.tensor_files import read_tensors
from tests.support.keeping import Kept, make_kept

STEPS = ("write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open", "close", "chmod")
OLD, NEW = 1.0, 2.0


@dataclass(frozen=True)
class Scenario:
    """How a save goes, and where it goes."""

    save: Callable[[Kept, Path], None]
    load: Callable[[Kept, Path], None]
    make: Callable[[Path], Kept] = lambda folder: make_kept()
    can_exchange: bool = True
    foreign: tuple[str, ...] = ()


def save_folder(kept: Kept, folder: Path) -> None:
    kept.save_state(folder / "state")


def save_in_background(kept: Kept, folder: Path) -> None:
    saving = kept.save_state(async_save=True)
    (value,) = kept.values()
    kept.fill(-1.0)  # training goes on
    saving.result()
    kept.fill(value)


def load_folder(kept: Kept, folder: Path) -> None:
    kept.load_state(folder / "state")


def save_weights(kept: Kept, folder: Path) -> None:
    kept.save_model(kept._models[0], folder / "state", max_shard_size=12)


def load_weights(kept: Kept, folder: Path) -> None:
    staging.recover(folder / "state")
    index = json.loads((folder / "state" / "model.safetensors.index.json").read_text())
    files = {name: read_tensors(folder / "state" / name) for name in set(index["weight_map"].values())}
    state = {name: files[file_name][name] for name, file_name in index["weight_map"].items()}
    kept._models[0].load_state_dict(state)
    kept.fill(float(state["bias"][0]))  # everything else is not part of a model folder
    kept._models[0].load_state_dict(state)


FOREIGN = ("log.txt", "logs/events")
SCENARIOS = {
    "automatic names, one kept": Scenario(
        lambda kept, folder: None if kept.save_state() else None,
        lambda kept, folder: kept.load_state(),
        lambda folder: make_kept(folder / "state", total_limit=1),
    ),
    "automatic names, one kept, in the background": Scenario(
        save_in_background,
        lambda kept, folder: kept.load_state(),
        lambda folder: make_kept(folder / "state", total_limit=1),
    ),
    "same folder, exchanged": Scenario(save_folder, load_folder),
    "same folder with files of others": Scenario(save_folder, load_folder, foreign=FOREIGN),
    "same folder, no exchange": Scenario(save_folder, load_folder, can_exchange=False),
    "model folder with files of others": Scenario(save_weights, load_weights, foreign=FOREIGN),
}


def kill_at(step: int) -> Callable[[], None]:
    """Make this process kill itself when it is about to take its `step`-th step; half of a write is written."""
    taken = 0

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken == step:
                if name == "write":
                    function(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    for name in STEPS:
        setattr(os, name, wrap(name, getattr(os, name)))
    staging.exchange_folders = wrap("exchange", staging.exchange_folders)
    return lambda: None


def refuse_exchange(first: Any, second: Any) -> None:
    raise OSError(errno.EINVAL, "not on this file system")


def killed(step: int, scenario: Scenario, kept: Kept, folder: Path) -> bool:
    """Save in a process of its own that is killed at `step`; False when it had finished before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kept.fill(NEW)
            kill_at(step)
            scenario.save(kept, folder)
            code = 0
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status) != 0:
        raise RuntimeError(f"the save failed at step {step}")
    return False


def run(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Kill at step 1, 2, 3, ... until a save gets through."""
    if not scenario.can_exchange:
        staging.exchange_folders = refuse_exchange  # type: ignore[assignment]
    problems: list[str] = []
    step = new = 0
    while True:
        step += 1
        place = folder / str(step)
        place.mkdir(parents=True)
        kept = scenario.make(place)
        kept.fill(OLD)
        scenario.save(kept, place)
        for name in scenario.foreign:
            (place / "state" / name).parent.mkdir(exist_ok=True)
            (place / "state" / name).write_text("theirs")
        was_killed = killed(step, scenario, kept, place)
        problems += [f"step {step}: {problem}" for problem in look(scenario, kept, place)]
        if not was_killed:
            return {"steps": step - 1, "new": new, "problems": problems}
        new += kept.values() == {NEW}


def look(scenario: Scenario, kept: Kept, place: Path) -> list[str]:
    """What is wrong after a kill: a mixed or unreadable state, lost files of others, rubbish after the next save."""
    problems = []
    kept.fill(0.0)
    try:
        scenario.load(kept, place)
    except Exception as error:
        return [f"cannot be loaded: {error!r}"]
    if kept.values() not in ({OLD}, {NEW}):
        problems.append(f"mixed values {kept.values()}")
    actual = kept.values()
    scenario.save(kept, place)
    kept.fill(0.0)
    scenario.load(kept, place)
    if kept.values() != actual:
        problems.append("the next save failed")
    hidden = [path for path in place.rglob(".*")]
    if hidden:
        problems.append(f"left behind: {[path.name for path in hidden]}")
    lost = [name for name in scenario.foreign if not (place / "state" / name).is_file()]
    if lost:
        problems.append(f"lost: {lost}")
    return problems


def main() -> None:
    folder = Path(sys.argv[1])
    exchange = staging.exchange_folders
    actual = {}
    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        staging.exchange_folders = exchange
        actual[name] = run(scenario, folder / str(number))
    print(json.dumps(actual))  # noqa: T201


if __name__ == "__main__":
    main()
