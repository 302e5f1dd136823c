"""Programs of two ranks with a mistake, and right ones that are slow; run by `test_mistakes_of_ranks.py`.

    python mistaken.py NAME               as one rank, started by a launcher
    python mistaken.py --fork NAME...     two ranks for each program, forked from here: the imports are paid once

The second form prints a JSON list: for each program the seconds from the mistake, and exit codes and outputs by rank.
"""

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_ops.watch import this_process
from accel_ops.watch.notes import STANDS
from accelerate import Accelerator

PATIENCE = float(os.environ.get("MISTAKEN_PATIENCE", "45"))  # seconds, after which a program counts as hanging
AT_ONCE = int(os.environ.get("MISTAKEN_AT_ONCE", "2"))  # programs


def x(size=4):
    return torch.ones(size)


def train(accelerator, steps, model=None):
    model = model or accelerator.prepare(torch.nn.Linear(3, 3))
    for _ in range(steps):
        note_begin(accelerator.process_index)
        accelerator.backward(model(torch.ones(2, 3)).sum())
    return model


def note_begin(rank):
    """Note when the last step before a mistake began; what comes before is importing."""
    if folder := os.environ.get("MISTAKEN_FOLDER"):
        Path(folder, f"{os.environ['MISTAKEN_NAME']}.{rank}.began").write_text(str(time.time()))


# ---- mistakes ---------------------------------------------------------------------------------------------------


def other_operation(accelerator, rank):
    dist.all_reduce(x()) if rank == 0 else dist.barrier()


def missing_call(accelerator, rank):
    if rank == 0:
        accelerator.gather(x())
    accelerator.wait_for_everyone()


def other_order(accelerator, rank):
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0))[:: 1 if rank else -1]:
        call(x())


def broadcast_that_one_rank_misses(accelerator, rank):
    if rank == 0:
        dist.broadcast(x(), 0)  # returns at once: the others need not be there
    dist.all_reduce(x())


def other_shape(accelerator, rank):
    dist.all_reduce(x(4000 if rank == 0 else 7000))


def other_small_shape(accelerator, rank):
    dist.all_reduce(x(4 if rank == 0 else 7))


def other_dtype(accelerator, rank):
    dist.all_reduce(x().to(torch.float32 if rank == 0 else torch.int64))


def reduce_of_other_shapes(accelerator, rank):
    accelerator.reduce(x(4 if rank == 0 else 7))


def shorter_loop_then_barrier(accelerator, rank):
    train(accelerator, 5 if rank == 0 else 4)
    accelerator.wait_for_everyone()


def shorter_loop_then_gather(accelerator, rank):
    train(accelerator, 5 if rank == 0 else 4)
    accelerator.gather(x())


def shorter_loop_then_the_end(accelerator, rank):
    train(accelerator, 5 if rank == 0 else 4)


def shorter_loop_on_rank_0(accelerator, rank):
    train(accelerator, 5 if rank == 1 else 4)


def skipped_backward(accelerator, rank):
    model = train(accelerator, 2)
    if rank == 0:  # as for a loss that is not finite
        train(accelerator, 1, model)
    accelerator.gather(x())


def caught_exception(accelerator, rank):
    try:
        if rank == 1:
            raise FileNotFoundError("a bad sample")
        accelerator.gather(x())
    except FileNotFoundError:
        pass
    accelerator.wait_for_everyone()


def left_the_group(accelerator, rank):
    if rank == 1:
        accelerator.end_training()
        time.sleep(8)
    else:
        accelerator.gather(x())


def exits(rank_that_exits, status):
    def program(accelerator, rank):
        if rank == rank_that_exits:
            sys.exit(status)
        accelerator.gather(x())

    return program


exits_early, rank_0_exits_early, exits_with_a_status = exits(1, 0), exits(0, 0), exits(1, 3)


def raises(accelerator, rank):
    if rank == 1:
        raise ValueError("only this rank has a problem")
    accelerator.gather(x())


def killed(accelerator, rank):
    while this_process._current._board is None:  # a process that dies before its first note leaves none
        time.sleep(0.01)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.gather(x())


class Deadly(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def dead_loader_worker(accelerator, rank):
    if rank == 1:
        next(iter(DataLoader(Deadly(), num_workers=1)))
    accelerator.wait_for_everyone()


def recv_without_send(accelerator, rank):
    dist.recv(x(), 1) if rank == 0 else accelerator.wait_for_everyone()


def both_receive(accelerator, rank):
    dist.recv(x(), 1 - rank)


def groups_in_other_order(accelerator, rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups[:: -1 if rank else 1]:
        dist.all_reduce(x(), group=group)


def asynchronous(accelerator, rank):
    if rank == 0:
        work = dist.all_reduce(x(), async_op=True)
        work.wait()
    accelerator.wait_for_everyone()


def reads_input(accelerator, rank):
    if rank == 1:
        input()
    accelerator.wait_for_everyone()


# ---- right programs ---------------------------------------------------------------------------------------------


def slow_sleep(accelerator, rank):
    for slow in (1, 0):
        if rank == slow:
            time.sleep(6)
        accelerator.wait_for_everyone()


def slow_computing(accelerator, rank):
    until = time.monotonic() + 5
    while rank == 0 and time.monotonic() < until:
        torch.ones(300, 300) @ torch.ones(300, 300)
    accelerator.gather(x())


def slow_in_python(accelerator, rank):
    until = time.monotonic() + 5
    while rank == 1 and time.monotonic() < until:
        sum(range(100))
    dist.all_reduce(x())


def slow_save_on_main(accelerator, rank):
    model = train(accelerator, 1)
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            accelerator.save_state(folder)  # alone: what it waits for is told by the others
            time.sleep(3)
        accelerator.wait_for_everyone()
        train(accelerator, 1, model)
        accelerator.wait_for_everyone()


def slow_input_on_main(accelerator, rank):
    answer = [sys.stdin.readline() if rank == 0 else None]
    from accelerate.utils import broadcast_object_list

    broadcast_object_list(answer)


def slow_first(accelerator, rank):
    with accelerator.main_process_first():
        time.sleep(2)


def slow_peers(accelerator, rank):
    for _ in range(3):
        if rank == 0:
            time.sleep(1)
            dist.send(x(1000), 1)
        else:
            dist.recv(x(1000), 0)


def uneven_gathers_of_a_group(accelerator, rank):
    groups = [dist.new_group([0]), dist.new_group([1]), dist.new_group([0, 1])]
    for _ in range(1 + rank):
        dist.all_reduce(x(), group=groups[rank])
    dist.barrier(group=groups[2])
    if rank == 0:
        time.sleep(2)
    dist.broadcast_object_list(["a"], 0, group=groups[2])


def groups_made_again(accelerator, rank):
    for turn in range(2):
        dist.all_reduce(x()) if turn else dist.barrier()
        if rank == turn:
            time.sleep(2)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        accelerator.state._reset_state(True)
        os.environ["MASTER_PORT"] = os.environ["MISTAKEN_PORTS"].split()[turn]
        accelerator = Accelerator(cpu=True)


def ends_one_by_one(accelerator, rank):
    """Rank 0, which holds the store, ends first."""
    accelerator.gather(x())
    if rank == 1:
        time.sleep(4)


def forks_while_waiting(accelerator, rank):
    loader = accelerator.prepare(DataLoader(list(range(8)), num_workers=1))
    for _ in loader:
        if rank == 0:
            time.sleep(0.5)
        accelerator.wait_for_everyone()


def stands_twice(accelerator, rank):
    """Rank 1 waits twice: others must see that it went on between."""
    if rank == 1:
        dist.recv(x(), 0)
        dist.recv(x(), 0)
        return
    stands = []
    for _ in range(2):
        stands.append(stand_of_rank_1(lambda note: note.stand not in stands))
        dist.send(x(), 1)
    assert stands == sorted(set(stands)), stands


def stand_of_rank_1(is_new):
    board = this_process._current._connected()
    while True:
        board.ask()
        note = board.read().get(1)
        if note is not None and note.state == STANDS and note.kind and is_new(note):
            return note.stand
        time.sleep(0.1)


# ---- running them -----------------------------------------------------------------------------------------------


def run(name):
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    note_begin(accelerator.process_index)
    globals()[name](accelerator, accelerator.process_index)


def begin_rank(name, rank, ports, folder, pipe):
    """Turn a forked process into a rank: the rest of it is an ordinary program."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(ports[0]), TORCHELASTIC_USE_AGENT_STORE="False", OMP_NUM_THREADS="1", MISTAKEN_FOLDER=folder,
        MISTAKEN_NAME=name, MISTAKEN_PORTS=" ".join(map(str, ports[1:])),
    )  # fmt: skip
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}.{rank}.{end}", os.O_CREAT | os.O_WRONLY), number)
    os.dup2(pipe, 0)  # a pipe into which nobody writes, unless a program is about that
    sys.stdin = open(0)  # noqa: SIM115 - as long as we live
    torch.set_num_threads(1)
    run(name)


def fork_all(names, folder, free_ports):
    """Run programs, a few at a time.

    Args:
        names: Of the programs.
        folder: For what they print.
        free_ports: Chooses a number of ports.

    Returns:
        For each program and rank the exit code, and when it ended; None in the ranks.
    """
    waiting, running, ended = list(names), {}, {}
    while waiting or running:
        while waiting and len(running) < 2 * AT_ONCE:
            name, ports, (out, into) = waiting.pop(0), free_ports(3), os.pipe()
            for rank in range(2):
                if (pid := os.fork()) == 0:
                    begin_rank(name, rank, ports, folder, out)
                    return None
                running[pid] = (name, rank, time.time(), os.pidfd_open(pid))
            if name == "slow_input_on_main":
                threading.Timer(6.0, os.write, (into, b"yes\n")).start()
        select.select([handle for *_, handle in running.values()], [], [], 0.5)
        for pid, (name, rank, begin, handle) in list(running.items()):
            if time.time() - begin > PATIENCE:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[name, rank] = (os.waitstatus_to_exitcode(status), time.time())
                os.close(handle)
                del running[pid]
    return ended


def report_on(ended, folder):
    report = {}
    for (name, rank), (code, at) in ended.items():
        own = report.setdefault(name, {"codes": {}, "seconds": {}, "out": {}, "err": {}})
        began = Path(folder, f"{name}.{rank}.began")
        own["codes"][rank] = code
        own["seconds"][rank] = round(at - float(began.read_text()), 2) if began.exists() else None
        for end in ("out", "err"):
            own[end][rank] = Path(folder, f"{name}.{rank}.{end}").read_text()
    return report


def main():
    if sys.argv[1] != "--fork":
        run(sys.argv[1])
        return
    sys.path.append(str(Path(__file__).parents[2]))
    for module in (
        "torch._dynamo",
        "accel_integrations.engines.ddp",
        "accelerate.preparing",
        "accelerate.checkpointing",
    ):
        import_module(module)  # once for all ranks
    folder = tempfile.mkdtemp()
    ended = fork_all(sys.argv[2:], folder, import_module("tests.support.ports").free_ports)
    if ended is not None:  # not one of the ranks
        sys.stdout.write(json.dumps(report_on(ended, folder)) + "\n")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
