"""Every test starts from nothing and must leave nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; the threads of torch would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import pytest_randomly
import torch

from tests.support.families import in_order
from tests.support.hidden_devices import hide_from
from tests.support.leaks import leaked_process_group, reset_state, restore_environment
from tests.support.short_run import LONG, SHORT, choose
from tests.support.skipped import lines_of

os.environ.setdefault("DS_BUILD_SHM_COMM", "0")  # or DeepSpeed compiles for a minute on a fresh machine
os.environ.setdefault(
    "RES_OPTIONS", "timeout:1 attempts:5"
)  # torch's stores ask DNS for names; 5 s for each lost question
pytest_randomly.entrypoint_reseeds = []  # DeepSpeed offers one, which would import all of it into every run


LEFT_OUT = pytest.StashKey[int]()
MOST_WORKERS = 4  # each of them has its own pool of ranks


def is_whole(config: pytest.Config) -> bool:
    """Whether the run names no files or folders."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def is_short(config: pytest.Config) -> bool:
    """Whether the run leaves out what says more of the same."""
    return not config.getoption("--all") and (is_whole(config) or bool(config.getoption("--short")))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs before they are counted; choose seed and examples, which are taken when tests are imported."""
    hide_from(config.args)
    seed = config.getoption("--sample-seed")
    if seed:
        config.option.randomly_seed = "default" if seed == "new" else int(seed)  # "default" draws one
    hypothesis.settings.register_profile(
        "this run",
        deadline=None,  # a busy machine is no fault of the code
        max_examples=SHORT if is_short(config) else LONG,
        derandomize=not seed,
    )
    hypothesis.settings.load_profile("this run")
    # The first backward pass of a process counts its devices, and FakeTensorMode pretends to have one: if it came before, no
    # test could fork processes that train.
    torch.ones((), requires_grad=True).backward()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of a run of everything: one for each core. Runs of named files have none, and so start at once."""
    if not is_whole(config):
        return 0
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In a run of everything, tests that share something expensive stay together."""
    if not is_whole(config):
        return None
    from tests.support.families import FamilyScheduling

    return FamilyScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`: everything, as `.ci/run` does it; `--short`: a sample, also of files that are named."""
    group = parser.getgroup("length of the run", "see tests/support/short_run.py").addoption
    group("--all", action="store_true", help="run every test; the default where files or folders are named")
    group(
        "--sample-seed", metavar="N", help="another sample, order and examples of property tests; `new` draws a seed"
    )
    group("--short", action="store_true", help="run a sample of long sweeps; the default of a run of everything")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what was imported out of garbage collections, each of which would look at all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave expensive tests that say more of the same to `--all`, unless files or folders were named."""
    if is_whole(config):
        items[:] = in_order(items)
    if not is_short(config):
        return
    seed = getattr(config.option, "randomly_seed", 0)
    items[:], left = choose(items, seed if isinstance(seed, int) else 0)
    config.hook.pytest_deselected(items=left)
    config.stash[LEFT_OUT] = len(left)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Learn from a worker how many tests were left out."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what did not run, and how it would."""
    reports = terminalreporter.stats.get("skipped", ())
    for line in lines_of(report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)):
        terminalreporter.write_line(line)
    if left := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"A short run: {left} more tests run with --all.")


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Reset the shared states around each test; fail one that leaves a process group open."""
    before = dict(os.environ)
    reset_state()
    yield
    reset_state()
    restore_environment(before)
    if leaked_process_group():
        import torch.distributed as dist

        dist.destroy_process_group()
        pytest.fail("the test left a process group open")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the pooled ranks exit by themselves, so that their coverage is written."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, 0)
    from tests.support.ranks import POOL

    POOL.close(politely=True)
