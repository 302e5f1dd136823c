"""`accelerate rehearse`: the command line, what it says, and scripts that cannot be rehearsed."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_cli.main import full_parser
from accel_cli.rehearse.cluster import settle
from accel_cli.rehearse.command import OLDEST_TORCH, REHEARSE
from accel_cli.rehearse.devices import DEVICES
from accel_cli.rehearse.report import as_text, fits, write_page
from accel_cli.rehearse.result import RESERVE, Exchange, Result
from accel_cli.rehearse.sweep import SweepRow, changes
from accel_cli.rehearse.times import step_time
from accel_cli.rehearse.zero import Zero
from accel_state.libraries import is_installed, is_torch_version
from tests.cli.running import PROGRAM, refusal, run

pytestmark = pytest.mark.skipif(not is_torch_version(">=", OLDEST_TORCH), reason=f"needs torch {OLDEST_TORCH}")
SCRIPT = """import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    # here
    optimizer.step()
    optimizer.zero_grad()
    # and here
"""
NUM_PARAMETERS = 64 * 256 + 256 + 256 * 10 + 10


def rehearse(folder: Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return run(PROGRAM, "rehearse", *flags, "train.py", folder=folder, OMP_NUM_THREADS="1", HF_HOME=str(folder))


def report_of(folder: Path, script: str, *flags: str) -> dict[str, Any]:
    """The report of a rehearsal that ends well."""
    done = rehearse(folder, script, *flags, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_an_unchanged_script_on_eight_ranks_of_two_machines(tmp_path: Path) -> None:
    aloud = "accelerator.save_state('out'); model.eval(); list(loader); model.train(); total = loss.item() > 2"
    flags = "--num_processes 8 --num_machines 2 --html page.html --find_batch_size --intra_gbps 100"
    report = report_of(tmp_path, SCRIPT.replace("# and here", aloud), *flags.split())
    num_bytes, at_peak, all_reduce = 4 * NUM_PARAMETERS, report["at_peak"], report["exchanges"][0]
    assert (at_peak["parameters"], at_peak["gradients"]) == (num_bytes, num_bytes)
    assert at_peak["optimizer state"] == 2 * num_bytes + 4 * 4, "two moments, and the step of each parameter"
    assert (all_reduce["name"], all_reduce["num_ranks"], all_reduce["num_bytes"]) == ("all-reduce", 8, num_bytes)
    assert all_reduce["between_machines"]
    assert report["flops"] == 2 * 8 * (64 * 256 + 256 * 10) + 2 * 8 * (64 * 256 + 2 * 256 * 10)
    assert (report["batch"], report["data_ranks"], report["largest_batch"]) == ([8], 8, 2**16)
    assert report["notes"][:2] == [
        "skipped: Accelerator.save_state",
        "skipped: evaluation, the loops over loaders while models are in evaluation mode",
    ]
    assert "train.py:15 reads the value of a tensor; 1.0 was assumed (--values has real ones)" in report["notes"]
    assert not (tmp_path / "out").exists()
    assert "<svg" in (tmp_path / "page.html").read_text()


@pytest.mark.takes_turns
def test_sharded_by_flags_of_the_launch(tmp_path: Path) -> None:
    flags = "--num_processes 4 --use_fsdp --fsdp_version 2 --device cpu --fake_data"
    report = report_of(tmp_path, SCRIPT, *flags.split())
    assert {exchange["name"] for exchange in report["exchanges"]} == {"all-gather", "reduce-scatter"}
    shard = 4 * (64 * 64 + 64 + 3 * 256 + 3)  # rank 0 has three rows of ten
    assert report["at_peak"]["parameters"] == shard


@pytest.mark.takes_turns
@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs DeepSpeed")
def test_zero_is_computed_from_a_rehearsal_of_ddp(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "bf16": {"enabled": True}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"train_micro_batch_size_per_gpu": "auto"}))
    flags = "--num_processes 4 --use_deepspeed --deepspeed_config_file config.json --device cpu"
    report = report_of(tmp_path, SCRIPT, *flags.split())
    assert report["at_peak"]["parameters"] == 2 * NUM_PARAMETERS
    assert report["at_peak"]["optimizer state"] == pytest.approx((2 * 4 + 4) * NUM_PARAMETERS / 4, rel=1e-3)
    assert report["at_peak"]["communication buffers"] == 2 * 1000
    names = [(exchange["name"], exchange["num_bytes"]) for exchange in report["exchanges"]]
    assert names == [("all-reduce", 2 * NUM_PARAMETERS), ("all-gather", 2 * NUM_PARAMETERS)]
    assert any(note.startswith("ZeRO 2: DDP was rehearsed") for note in report["notes"])


def test_what_zero_shards_is_divided_and_what_is_offloaded_is_on_the_host() -> None:
    ddp = {"parameters": 400, "gradients": 0, "communication buffers": 400, "optimizer state": 800, "activations": 50,
           "optimizer step": 80, "weight copies": 200}  # fmt: skip
    held = Zero(stage=1, num_ranks=4, bucket=10).memory(ddp)
    assert held == {
        "parameters": 400, "gradients": 400, "communication buffers": 40, "optimizer state": (800 + 400) // 4,
        "activations": 50, "optimizer step": 20, "weight copies": 0, "data on the host": 0,
    }  # fmt: skip
    sharded = Zero(stage=3, num_ranks=4, bucket=10, max_live=25).memory(ddp)
    assert (sharded["parameters"], sharded["gradients"], sharded["communication buffers"]) == (100, 100, 40 + 100)
    offloaded = Zero(stage=3, num_ranks=4, bucket=10, offload_optimizer=True, offload_parameters=True).memory(ddp)
    assert (offloaded["parameters"], offloaded["optimizer state"]) == (0, 0)
    assert offloaded["data on the host"] == 100 + 300 + 20


@pytest.mark.takes_turns
def test_scripts_that_need_values_are_told_the_line_and_may_have_some(tmp_path: Path) -> None:
    needy = SCRIPT.replace("# here", "picked = inputs[labels > 3]")
    done = rehearse(tmp_path, needy, "--num_processes", "4")
    assert (done.returncode, done.stdout) == (2, "")
    assert "accelerate rehearse: error: train.py:12 needs the values of a tensor" in done.stderr
    assert "--values" in done.stderr
    done = rehearse(tmp_path, needy, "--num_processes", "4", "--values")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train.py: rank 0 of 4, h100, step 3" in done.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "library = torch.library.Library('mine', 'DEF'); library.define('twice(Tensor x) -> Tensor'); "
            "library.impl('twice', lambda x: 2 * x, 'CPU'); torch.ops.mine.twice(loss)",
            "train.py:12: the operation mine.twice.default has no meta kernel",
        ),
        ("continue", "train.py took no optimizer step"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_sentence(change: str, message: str, tmp_path: Path) -> None:
    done = rehearse(tmp_path, SCRIPT.replace("# here", change), "--num_processes", "4")
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_processes", "8", "--num_machines", "3"], "num_processes must be divisible by num_machines, got 8"),
        (["--device", "h1000"], "Did you mean 'h100'?"),
        (["--steps", "1"], "--steps must be at least 2, got 1"),
        (["--inter_gbps", "0"], "--inter_gbps must be above 0, got 0."),
        (["--device", "cpu", "--find_batch_size"], "--find_batch_size needs a device with a memory of its own"),
        (["--num_processes", "4", "--mixed_precision", "fp8"], "its kernels need a GPU"),
        (["--num_processes", "4", "--rank", "4"], "--rank must be at least 0 and less than the 4 processes, got 4."),
    ],
)
def test_wrong_command_lines(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('must not run')")
    assert message in refusal(capsys, "rehearse", *flags, str(script))


def result() -> Result:
    reduce_inside = Exchange("reduce-scatter", "dp_shard", 4, False, 2, 4_000_000, True)
    reduce_between = Exchange("all-reduce", "dp_replicate", 2, True, 1, 1_000_000, True)
    gather = Exchange("all-gather", "tp", 2, False, 10, 2_000_000, False)
    return Result(
        8, 2, 3, {"parameters": 2**30, "activations": 3 * 2**30, "data on the host": 2**40},
        timeline=[(0, {"parameters": 2**30}), (9, {"parameters": 2**30, "activations": 3 * 2**30})],
        exchanges=[reduce_inside, reduce_between, gather], flops=10**12, seconds=0.01, shortest_seconds=0.001,
        batch=[4, 128], num_batches=1, data_ranks=4,
    )  # fmt: skip


def test_the_time_of_a_step_is_that_of_rings_at_the_bandwidth_of_each_link() -> None:
    device = replace(DEVICES["h100"], intra_gbps=100, inter_gbps=10)
    time = step_time(result(), device)
    assert time.in_background == pytest.approx(2 * 3 / 4 * 4e6 / 100e9 + 2 * 1 / 2 * 1e6 / 10e9)
    assert time.waited_for == pytest.approx(10 * 1 / 2 * 2e6 / 100e9)
    assert time.total == pytest.approx(0.01 + time.waited_for)  # the rest is hidden by computing
    assert step_time(replace(result(), seconds=0.0), device).total == pytest.approx(
        time.in_background + time.waited_for
    )
    assert time.mfu == pytest.approx(0.001 / time.total)


def test_memory_fits_with_a_reserve_and_data_on_the_host_do_not_count() -> None:
    device = replace(DEVICES["h100"], memory_bytes=int(4 * 2**30 / (1 - RESERVE)) + 1)
    assert fits(result(), device)
    assert not fits(result(), replace(device, memory_bytes=4 * 2**30))
    text = as_text("train.py", result(), device)
    assert re.search(r"memory at the peak +4\.00 GiB\n +activations +3\.00 GiB\n +parameters +1\.00 GiB\n", text)
    assert re.search(r"all-reduce +dp_replicate +2 +1 +976\.56 KiB .*between machines", text)


def test_changes_that_do_not_fit_the_number_of_ranks_are_left_out() -> None:
    assert {"HSDP", "TP 2, FSDP 2"} <= changes(8, 2).keys()
    assert "HSDP" not in changes(8, 1)
    assert "TP 2, FSDP 2" not in changes(6, 2)
    assert "ZeRO 3" not in changes(8, 2)
    assert changes(8, 2, uses_deepspeed=True)["ZeRO 3"] == {"use_deepspeed": True, "zero_stage": 3}


def test_the_page_loads_nothing_and_shows_every_kind_of_memory(tmp_path: Path) -> None:
    rows = [
        SweepRow("FSDP 2", "--use_fsdp", 2**30, 0.5, 64.0, True),
        SweepRow("DDP", "", reason="cannot be rehearsed: <reason>"),
    ]
    path = tmp_path / "page.html"
    write_page(str(path), "train & test.py", result(), DEVICES["h100"], rows)
    text = path.read_text()
    assert "train &amp; test.py" in text
    assert "&lt;reason&gt;" in text
    assert "://" not in text
    assert re.findall(r"<polygon[^>]*><title>([^<]*)<", text) == ["parameters", "activations"]


@pytest.mark.thorough
def test_advice_is_rehearsed_and_ranked(tmp_path: Path) -> None:
    rows = report_of(tmp_path, SCRIPT, "--num_processes", "4", "--num_machines", "2", "--sweep")["sweep"]
    rehearsed = [row for row in rows if not row["reason"]]
    assert {"as it is", "DDP", "FSDP 2", "HSDP"} <= {row["title"] for row in rehearsed}
    assert [row["samples"] for row in rehearsed] == sorted((row["samples"] for row in rehearsed), reverse=True)
    peaks = {row["title"]: row["peak_bytes"] for row in rehearsed}
    assert peaks["FSDP 2, offload"] < peaks["FSDP 2"] < peaks["DDP"] == peaks["as it is"]


def test_a_port_that_is_taken_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_cli.launch.machine.is_free", lambda port: False)
    (tmp_path / "train.py").write_text(SCRIPT)
    args = full_parser().parse_args(["rehearse", "--num_processes", "4", str(tmp_path / "train.py")])
    assert settle(args, REHEARSE, {}).num_processes == 4
