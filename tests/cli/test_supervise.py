"""Watching processes: what hangs where, and what died of what."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_cli.launch.plan import Plan
from accel_cli.launch.runners import local
from accel_cli.launch.runners.signals import status_after
from accel_cli.launch.runners.torchrun import Ends
from accel_cli.supervise.failures import Failure, describe_end, read_failures
from accel_cli.supervise.stacks import parse
from accel_cli.supervise.watch import MOST_UNANSWERED, Watch, _busy_seconds, _holds_accelerator
from accel_ops.collectives.transport import ALL_GATHER
from accel_state import supervision
from accel_state.stack_requests import answer_requests
from tests.cli.running import python, run

SCRIPT = str(Path(__file__).parent / "supervised.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
SIGNALLED = Path(__file__).parent / "signalled.py"
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
BY_TORCH = ["--role", "trainer"]  # which only torch's agent knows


def told(pattern: str, launcher: subprocess.Popen[str]) -> list[str]:
    """What the pattern finds in the next line of each of the two processes.

    Between these lines are those of gloo of torch 2.9, which prints to standard output, now and then one into another.
    """
    assert launcher.stdout is not None
    found = (re.search(pattern, line) for line in iter(launcher.stdout.readline, ""))
    return [match[0] for match in islice((match for match in found if match), 2)]


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    return run(*LAUNCH, *words, OMP_NUM_THREADS="1")


# ---- real runs --------------------------------------------------------------------------------------------------


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize("agent", [[], BY_TORCH], ids=["local", "torchrun"])
def test_a_run_that_hangs_is_ended_and_shown(agent: list[str]) -> None:
    done = launch(*agent, "--no_watch_ranks", "--hang_timeout", "2", SCRIPT, "mismatch")
    assert done.returncode == 124
    assert "the run hangs: no process has made progress for 2 seconds" in done.stderr
    table = [line.split() for line in done.stderr.splitlines() if re.match(r"\d  ", line)]
    assert [row[0] for row in table] == ["0", "1"]
    assert table[0][1:3] == ["gather", f"({ALL_GATHER})"]
    assert table[1][1] == "wait_for_everyone"
    assert all("supervised.py:" in " ".join(row) for row in table)
    assert done.stderr.count("most recent call first") == 2


@pytest.mark.thorough
@pytest.mark.launch
@pytest.mark.parametrize(
    ("what", "row", "times"),
    [
        ("left_alone", r"1\s+-\s+.*supervised.py:\d+ in sleep_for_ever", 1),
        pytest.param(
            "keeps_the_gil", r"\d  .*supervised.py:\d+ in keep_the_gil", 2,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="locks a mutex as Linux has them"),
        ),
    ],
)  # fmt: skip
def test_a_process_that_others_wait_for_in_vain_is_shown_where_it_is(what: str, row: str, times: int) -> None:
    done = launch("--hang_timeout", "2", SCRIPT, what)
    assert done.returncode == 124
    assert len(re.findall(f"^{row}$", done.stderr, re.MULTILINE)) == times


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize("what", ["computes", "steps", "barriers"])
def test_a_run_in_which_anybody_goes_on_is_left_alone(what: str) -> None:
    done = launch("--hang_timeout", "3", SCRIPT, what)  # a process that ends on a busy machine is silent for a second
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr
    assert done.stderr == ""


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize("agent", [[], BY_TORCH], ids=["local", "torchrun"])
def test_the_first_error_is_told_once_and_first(agent: list[str]) -> None:
    done = launch(*agent, SCRIPT, "raises")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.index("\naccelerate launch: rank 1 failed") < done.stderr.index(
        "only this process has a problem"
    )
    assert done.stderr.count("only this process has a problem") == 2, "once in the source line, once as the message"
    assert "process 1 (pid" in done.stderr.splitlines()[-1]


@pytest.mark.takes_turns
@pytest.mark.launch
@pytest.mark.parametrize("restarts", [[], ["all are restarted (restart 1 of 1)"]], ids=["once", "restarted"])
def test_a_process_that_was_killed_is_told_of(restarts: list[str]) -> None:
    done = launch("--max_restarts", str(len(restarts)), SCRIPT, "killed")
    assert done.returncode == 137
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("accelerate launch: process ")]
    assert [re.sub(r"pid \d+", "pid", line) for line in lines] == [
        f"accelerate launch: process 1 (pid) was killed by SIGKILL: the machine ran out of memory, or a user killed it; {what}."
        for what in (*restarts, "the others were terminated")
    ]
    assert "rank 0 failed" not in done.stderr, "which has lost rank 1"


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_launcher(number: signal.Signals) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*LAUNCH, SCRIPT, "waits"], env=environment, **PIPES) as launcher:
        workers = [int(pid) for pid in told(r"(?<=waiting )\d+", launcher)]
        handles = [os.pidfd_open(worker) for worker in workers]
        launcher.send_signal(number)
        printed, said = launcher.communicate(timeout=300)
    assert printed == "", "the pipe ends when the last process does"
    assert "accel_cli" not in said, "the only tracebacks are the script's"
    assert launcher.returncode == (-number if number == signal.SIGKILL else 128 + number)
    for handle in handles:  # a process closes its pipes a moment before it is gone
        assert select.select([handle], [], [], 30)[0]
        os.close(handle)


def ends_with(
    name: str, ranks: str, status: int, *flags: str, seconds: float = 0, kind: str = "plain"
) -> tuple[int, str]:
    """Start two processes, send the launcher a signal, and return its exit status and what the processes say."""
    words = [*LAUNCH, *flags, str(SIGNALLED), name, ranks, str(status), str(seconds), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, env=environment, **PIPES) as launcher:
        assert told("ready$", launcher) == ["ready"] * 2
        launcher.send_signal(getattr(signal, name))
        said, _ = launcher.communicate(timeout=300)
    return launcher.returncode, said


@pytest.mark.takes_turns
@pytest.mark.launch
def test_the_status_that_a_script_chooses_after_a_signal_is_kept() -> None:
    assert ends_with("SIGTERM", "0,1", 75)[0] == 75
    assert ends_with("SIGTERM", "1", 75)[0] == 75, "the other one died of the signal"
    assert ends_with("SIGTERM", "0,1", 0)[0] == 0, "as with one process"
    assert ends_with("SIGTERM", "0", 0)[0] == 143, "not all of them ended well"
    assert ends_with("SIGHUP", "", 75)[0] == 129
    assert ends_with("SIGUSR1", "0,1", 75)[0] == 75
    assert ends_with("SIGUSR2", "", 75)[0] == 140, "it is for the script to handle it"


@pytest.mark.thorough
@pytest.mark.launch
def test_processes_may_take_their_time_after_an_interrupt() -> None:
    status, said = ends_with("SIGINT", "0,1", 75, seconds=1.0)
    assert status == 75
    assert "rank 1 got [2]" in said, "and no SIGTERM, which would have ended it"


@pytest.mark.thorough
@pytest.mark.launch
@pytest.mark.parametrize("by", [(), BY_TORCH])
def test_how_long_processes_may_take_can_be_set(by: tuple[str, ...]) -> None:
    status, said = ends_with("SIGTERM", "0,1", 75, *by, "--shutdown_timeout", "1", seconds=600)
    assert status == 75
    assert "rank 0 got [15]" in said
    assert "rank 1" not in said, "it was killed before"


@pytest.mark.thorough
@pytest.mark.launch
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signals_reach_the_processes_of_torchs_agent_too(name: str) -> None:
    """Also in a run that is watched: asking for stacks uses neither signal."""
    status, said = ends_with(name, "0,1", 75, *BY_TORCH, "--hang_timeout", "12", kind="with_accelerator")
    assert status == 75, said


@pytest.mark.thorough
@pytest.mark.launch
def test_only_a_port_that_was_named_can_be_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        environment = {**meeting, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        worker = (sys.executable, "-u", SCRIPT, "nothing")
        plan = Plan("local", (), environment, port_may_change=True, worker=worker, num_workers=2)
        assert local.run(plan) == 0
        said = capfd.readouterr()
        assert said.out.count("done\n") == 2
        assert said.err == "", "a port of its own is kept for it from the start"
        assert local.run(replace(plan, port_may_change=False)) == 1
        assert "EADDRINUSE" in capfd.readouterr().err
        group = local._Group(plan, meeting["MASTER_PORT"], may_try_again=True)
        group.run()
        assert group.lost_its_port
        assert capfd.readouterr().err == "", "it may try again"


# ---- parts ------------------------------------------------------------------------------------------------------

STACKS = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait

Current thread 0x00007e (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 4394 in all_gather_single
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/packages/accel_ops/transport.py", line 56 in all_gather
  File "/x/site-packages/accelerate/accelerator.py", line 780 in gather
  File "/home/me/train.py", line 7 in evaluate
  File "/home/me/train.py", line 29 in <module>
"""


def test_stacks_are_read() -> None:
    stack = parse(STACKS)
    assert stack.collective == "gather (all_gather_single)"
    assert stack.line == "/home/me/train.py:7 in evaluate"
    assert stack.is_waiting
    busy = parse(STACKS.replace("torch/distributed", "torch/nn"))
    assert (busy.collective, busy.is_waiting) == ("", False)
    assert parse("").line == "nowhere in Python"


def stacks_from(pipe: int) -> str:
    """What `faulthandler` writes piece by piece, to the outermost frame of the main thread."""
    text, ends = "", (" in <module>\n", " in _run_module_as_main\n", "  ...\n")  # or as many frames as it writes
    while not text.endswith(ends):
        text += os.read(pipe, 1 << 16).decode()
    return text


def test_stacks_are_asked_for_without_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler walks the frames of threads that run, which crashes a healthy process now and then."""
    monkeypatch.setattr("os.kill", lambda *args: args[1] and sent.append(args))  # 0 asks whether a process lives
    sent: list[Any] = []
    written, stacks = os.pipe()
    with closing(Watch(hang_timeout=600)) as watch:
        Path(watch.folder, "0.pid").write_text(str(os.getpid()))
        assert answer_requests(watch.folder, 0, stacks) is not None
        monkeypatch.setattr("accel_cli.supervise.watch.SAMPLES", 1e9)
        for _ in range(20):
            watch.look()
            stack = parse(answer := stacks_from(written))
            with Path(watch.folder, "0.stacks").open("a") as file:
                file.write(answer)
            assert any("test_supervise.py" in str(frame) for frame in stack.frames)
            assert "most recent call first" in stack.text
            assert "stack_requests" not in stack.text, "the thread that writes is none of the program's"
        assert sent == []
        with monkeypatch.context() as context:
            context.setattr("accel_cli.supervise.watch._parent_of", lambda process_id: os.getpid())
            looks = next(number for number in range(20) if watch.look() or sent)  # nobody copies the answers now
        assert looks == MOST_UNANSWERED + 1, "the first one reads the last answer"
        assert sent == [(os.getpid(), supervision.STACK_SIGNAL)]
    os.close(written)


def test_a_hang_is_reported_with_the_stacks_of_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def write(file: str) -> None:
        with Path(watch.folder, "0.stacks").open("a") as written:
            written.write(f'Thread 0x1 (most recent call first):\n  File "/{file}.py", line 1 in <module>\n')

    def send(process: int, number: int) -> None:
        if number == supervision.STACK_SIGNAL:
            write("where_it_hangs")

    monkeypatch.setattr("os.kill", send)
    monkeypatch.setattr("accel_cli.supervise.watch._parent_of", lambda process: os.getpid())
    monkeypatch.setattr("accel_cli.supervise.watch._busy_seconds", lambda process: 0.0)
    with closing(Watch(hang_timeout=1e-6, say=told.append)) as watch:
        Path(watch.folder, "0.pid").write_text("1")
        write("where_it_was_before")
        assert any(watch.look() or watch.is_hanging for _ in range(20))
    assert "/where_it_hangs.py" in told[0]
    assert "/where_it_was_before.py" not in told[0]


def test_nobody_waits_for_requests_that_never_come(watch: Watch) -> None:
    before = threading.active_count()
    assert answer_requests(watch.folder, 0, 2) is None
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("codes", "crashed", "status"),
    [
        ({0: 75, 1: 75}, (), 75),
        ({0: -15, 1: 75}, (), 75),
        ({0: 1, 1: 75}, (0,), 75),  # it lost the other one
        ({0: 1, 1: -15}, (0,), 143),
        ({0: 0, 1: 1}, (1,), 1),
        ({0: 0, 1: 0}, (), 0),
        ({0: 0, 1: -9}, (), 143),
        ({}, (), 143),
    ],
)
def test_status_after_a_signal(codes: dict[int, int], crashed: tuple[int, ...], status: int) -> None:
    assert status_after(signal.SIGTERM, codes, crashed) == status


def test_ends_in_words() -> None:
    assert describe_end(3) == "ended with exit status 3"
    assert describe_end(-signal.SIGSEGV) == "was killed by SIGSEGV: a segmentation fault in compiled code"
    assert describe_end(-signal.SIGUSR2) == "was killed by SIGUSR2"
    assert describe_end(-200) == "was killed by signal 200"


class Said(list[str]):
    """Collects what a watch says."""

    def __str__(self) -> str:
        return "".join(self)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def watch(said: Said) -> Any:
    watch = Watch(say=said.append)
    yield watch
    watch.close()


def leave(watch: Watch, rank: int, text: str, ago: float = 0.0) -> None:
    supervision.write_atomically(watch.folder, f"{rank}.error", f"{time.time() - ago}\n{text}")


LOST = "Traceback\n  File x\nRuntimeError: Connection closed by peer [127.0.0.1]:1\n"


def test_what_follows_from_an_error_is_folded(watch: Watch, said: Said) -> None:
    leave(watch, 1, LOST)
    watch.look()
    assert said == [], "perhaps the error that it follows from is still to come"
    leave(watch, 0, "Traceback\nValueError: mine\n")
    for _ in range(2):
        watch.look()
    assert str(said).startswith("\naccelerate launch: rank 0 failed:\nTraceback\nValueError: mine\n")
    assert str(said).count("\n") == 5
    assert "rank 1 ended after it: RuntimeError: Connection closed by peer" in said[1]


def test_an_error_that_follows_from_none_is_told_after_a_moment(watch: Watch, said: Said) -> None:
    leave(watch, 1, LOST, ago=5)
    watch.look()
    assert "rank 1 failed, because it lost another rank" in str(said)


def test_errors_of_processes_that_were_restarted_are_told_once(watch: Watch, said: Said) -> None:
    leave(watch, 1, LOST)
    watch.begin_attempt({})
    assert "rank 1 failed" in said[0]
    watch.look()
    assert len(said) == 1
    leave(watch, 1, "ValueError: of the next\n")
    watch.look()
    assert said[1:] == ["\naccelerate launch: rank 1 failed:\nValueError: of the next\n"]


def test_the_process_that_was_killed_is_the_cause_though_its_victim_was_seen_first(watch: Watch, said: Said) -> None:
    attempts = [{rank: SimpleNamespace(pid=10 * n + rank, returncode=None) for rank in range(3)} for n in (1, 2)]
    for rank, process in attempts[0].items():
        supervision.write_atomically(watch.folder, f"{rank}.pid", str(process.pid))
    leave(watch, 0, LOST)
    told: list[str] = []
    ends = Ends(watch, 3, told.append)
    ends._processes = lambda: attempts[0]  # type: ignore[assignment, method-assign]
    ends.look()
    assert ends.cause() is None
    for rank, code in ((0, 1), (2, -signal.SIGTERM), (1, -signal.SIGKILL)):  # a victim, one that the agent has ended
        attempts[0][rank].returncode = code
        ends.look()
    assert ends.codes == {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM}
    assert ends.killed == {1: -signal.SIGKILL}
    ends._processes = lambda: attempts[1]  # type: ignore[assignment, method-assign]
    ends.look()
    assert told == [f"process 1 (pid 11) {describe_end(-9)}; all are restarted (restart 1 of 3)."]
    assert str(said).startswith(f"\naccelerate launch: rank 1 {describe_end(-9)}."), (
        "the headline, before its victim's error"
    )


def test_nothing_is_lost_at_the_end(said: Said) -> None:
    watch = Watch(say=said.append)
    leave(watch, 1, LOST)
    watch.close()
    assert "rank 1 failed" in str(said)
    assert not Path(watch.folder).exists()


def test_errors_that_follow_from_a_killed_process(watch: Watch, said: Said) -> None:
    leave(watch, 1, LOST)
    watch.look({0: -signal.SIGKILL})
    assert said[0].startswith("\naccelerate launch: rank 0 was killed by SIGKILL")
    assert "rank 1 ended after it" in said[1]


def test_nothing_is_said_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch(quiet=True)
    leave(watch, 0, "ValueError: x\n")
    watch.look()
    watch.close()
    assert capsys.readouterr().err == ""


def test_failures_come_in_the_order_of_time(watch: Watch) -> None:
    for rank, ago in ((0, 1.0), (1, 3.0), (2, 2.0)):
        leave(watch, rank, f"ValueError: {rank}\n", ago)
    Path(watch.folder, "x.error").write_text("no rank")
    assert [failure.rank for failure in read_failures(watch.folder)] == [1, 2, 0]
    assert Failure(0, 0.0, "").headline == ""


def test_ranks_have_met_before_any_progress(watch: Watch) -> None:
    """A short program may end without a collective: the launch of another machine has not ended too early then."""
    assert not watch.has_met
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    program = "from accel_state import PartialState, supervision; PartialState(cpu=True); print(*supervision.counter)"
    done = python("-c", program, **watch.variables, **ranks)
    assert done.stdout.split()[-1] == "0", "which would be progress"  # gloo of torch 2.9 prints a line before it
    assert watch.has_met


def test_processes_of_others_report_to_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(supervision.VARIABLE, f"1:{tmp_path}")
    supervision.report_to_launcher(0)
    assert supervision.counter is None
    assert not list(tmp_path.iterdir())


def test_a_signal_that_the_program_uses_itself_is_left_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert supervision.STACK_SIGNAL is not None
    monkeypatch.setenv(supervision.VARIABLE, f"{os.getppid()}:{tmp_path}")
    before = signal.signal(supervision.STACK_SIGNAL, own := lambda number, frame: None)
    try:
        supervision.report_to_launcher(0)
        assert signal.getsignal(supervision.STACK_SIGNAL) is own
        assert not list(tmp_path.iterdir()), "the launcher must not send it"
    finally:
        signal.signal(supervision.STACK_SIGNAL, before)


def test_a_timeout_that_nobody_hears_of_is_pointed_out(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_cli.supervise.watch.START_SECONDS", 0)
    watch = Watch(hang_timeout=1e-9, say=said.append)
    for _ in range(2):
        watch.look()
    watch.close()
    assert len(said) == 1
    assert "no process reports" in str(said)


SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print('', flush=True)\nwhile True: pass"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux keeps this time")
def test_a_process_that_waits_for_a_core_is_busy() -> None:
    core = str(min(os.sched_getaffinity(0)))
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN, core], stdout=subprocess.PIPE) for _ in range(4)]
    try:
        for process in spinning:
            process.stdout.readline()  # type: ignore[union-attr]
        began, before = time.monotonic(), [_busy_seconds(process.pid) for process in spinning]
        while time.monotonic() - began < 1:  # of which each gets a quarter of the core, or less
            select.select([], [], [], 0.1)
        seconds = time.monotonic() - began
        assert all(
            _busy_seconds(process.pid) - was > 0.7 * seconds for process, was in zip(spinning, before, strict=True)
        )
    finally:
        for process in spinning:
            process.kill()
            process.communicate()
    assert _busy_seconds(spinning[0].pid) == 0.0, "it has ended"


def test_a_process_with_an_open_gpu_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _holds_accelerator(os.getpid())
    monkeypatch.setattr("accel_cli.supervise.watch.ACCELERATORS", (str(tmp_path / "nvidia"),))  # there is none here
    with (tmp_path / "nvidia0").open("w"):
        assert _holds_accelerator(os.getpid())
    assert not _holds_accelerator(2**30), "there is no such process"


def test_folders_of_killed_launchers_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone, other = tmp_path / "accelerate_watch_999999999_x", tmp_path / "accelerate_watch_x"
    for folder in (gone, other):
        folder.mkdir()
    watch = Watch()
    assert not gone.exists()
    assert other.exists()
    assert Watch().folder != watch.folder
    assert Path(watch.folder).exists(), "its launcher lives"
