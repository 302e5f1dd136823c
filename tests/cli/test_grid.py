"""`accelerate test --grid`: rows that agree with one process, planted faults, and scripts that a configuration cannot run."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from accel_cli.grid.command import CONFIGURATIONS
from accel_cli.grid.compare import GridRun, compare
from accel_cli.selftest import script_path
from accel_state.libraries import is_installed
from tests.cli.running import refusal

EARLY_BF16 = """
        def divided_early(group, bucket):
            half = (bucket.buffer() / accelerator.num_processes).to(torch.bfloat16)
            work = torch.distributed.all_reduce(half, async_op=True)
            return work.get_future().then(lambda done: done.value()[0].float())
        model.register_comm_hook(None, divided_early)
"""
COUNTED_ONCE = """
        block = self.blocks[0]
        if os.environ.get("WORLD_SIZE") == "3":
            frozen = {name: value.detach() for name, value in block.named_parameters()}
            hidden = torch.func.functional_call(block, frozen, hidden)
        else:
            hidden = block(hidden)
"""
REDUCED_TWICE = """
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero
        reduce = Zero.average_tensor
        def reduce_twice(*arguments):
            reduce(*arguments)
            reduce(*arguments)
        Zero.average_tensor = reduce_twice
"""
PREPARED = "    for index, batch in enumerate(loader):\n"
FAULTS = {
    "ddp-2": "gradient norm",
    "ddp-3": "gradient norm",
    "fsdp2-2": "loss",
    "sp-2": "loss",
    "zero2-2": "gradient norm",
}
"""The configuration in which each fault shows -> what is wrong first."""


def grid(*words: str) -> tuple[int, dict[str, str], str]:
    """The exit status, the result of each configuration, and everything printed."""
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli.main", "test", "--grid", *words],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    lines = [re.split(r"\s{2,}", line) for line in done.stdout.splitlines()]
    return done.returncode, {line[0]: line[-1] for line in lines[1:-1]}, done.stdout + done.stderr


def planted(folder: Path) -> str:
    """The bundled script with a fault in each of some configurations."""
    text = Path(script_path("gradient_grid.py")).read_text()
    is_ddp_2 = "accelerator.distributed_type.name == 'MULTI_CPU' and accelerator.num_processes == 2"
    for old, new in {
        PREPARED: f"    if {is_ddp_2} and not accelerator.parallelism_config:{EARLY_BF16}{PREPARED}",
        "        return self.head(": f"{COUNTED_ONCE}        return self.head(",
        "weight=weight)": "weight=weight if accelerator.parallelism_config is None else 1)",
        "accelerator.backward(loss / ": "accelerator.backward((1 + accelerator.is_fsdp2) * loss / ",
        "    model = LanguageModel()\n": f"    if by_hand:{REDUCED_TWICE}    model = LanguageModel()\n",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    script = folder / "planted.py"
    script.write_text(text)
    return str(script)


@pytest.mark.launch
def test_two_ranks_agree_with_one_process() -> None:
    status, results, printed = grid("--only", "fsdp2-2")
    assert results == {"fsdp2-2": "ok"}, printed
    assert status == 0


@pytest.mark.launch
@pytest.mark.thorough
def test_every_configuration_agrees_with_one_process() -> None:
    status, results, printed = grid()
    expected = {row.name: "ok" for row in CONFIGURATIONS if not row.library or is_installed(row.library)}
    assert {name: results[name] for name in expected} == expected, printed
    assert status == 0


@pytest.mark.launch
@pytest.mark.thorough
def test_planted_faults_are_found(tmp_path: Path) -> None:
    faults = {name: figure for name, figure in FAULTS.items() if name != "zero2-2" or is_installed("deepspeed")}
    status, results, printed = grid("--only", ",".join(faults), planted(tmp_path))
    assert status == 1, printed
    for name, figure in faults.items():
        assert results[name].startswith(f"differs: the {figure} of step 1 "), printed


@pytest.mark.launch
@pytest.mark.thorough
def test_a_script_that_forgets_tokens_or_cannot_run_somewhere(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        print("not shown")
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
        data = [(torch.randn(4), torch.full((1,), float(index % 5 == 0))) for index in range(40)]
        model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=7, shuffle=True))
        for inputs, counts in loader:
            loss = (model(inputs) * counts).square().sum() / counts.sum()  # a mean over each rank's own items
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        """)
    )
    status, results, printed = grid("--only", "ddp-2,tp-2,cp-2", str(script), "0.1")
    assert status == 1, printed
    assert results["ddp-2"].startswith("differs: the loss of step 1 is ")
    assert results["tp-2"].startswith("not run: ValueError: ")
    assert results["cp-2"] == "not run: the script has no `with accelerator.maybe_context_parallel(...)`"
    assert "not shown" not in printed
    assert "0 ok, 1 differs, 0 failed, 2 not run" in printed


def figures(loss: float = 1.0, norm: float = 1.0, update: float = 1.0, steps: int = 2) -> GridRun:
    tensors = [{"weight": torch.full((4,), update), "bias": torch.zeros(2)}] * steps
    return GridRun([loss] * steps, [[1.0, norm]] * steps, tensors, {"weight": 1.0, "bias": 1.0}, {})


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (figures(loss=1 + 1e-6, norm=1 - 1e-6, update=1 + 1e-6), ""),
        (figures(loss=2.0, norm=3.0), "the loss of step 1 is 2 instead of 1, a relative difference of 1.0e+00"),
        (figures(norm=1.5), "the gradient norm of step 1 is 1.5 instead of 1, a relative difference of 5.0e-01"),
        (figures(update=1.1), "the update of step 1 differs in weight, a relative difference of 1.0e-01"),
        (figures(loss=float("nan")), "the loss of step 1 is nan instead of 1, a relative difference of inf"),
        (figures(steps=1), "it took 1 optimizer steps, and one process took 2"),
    ],
)
def test_the_reason_is_what_differs_first(run: GridRun, reason: str) -> None:
    assert compare(run, figures()).reason == reason


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "ddp-2"], "takes --only ('ddp-2') with --grid alone"),
        (["train.py"], "takes a script ('train.py') with --grid alone"),
        (["--grid", "--only", "ddp-9"], "there is no configuration 'ddp-9'"),
        (["--grid", "--only", ","], "there is no configuration ','"),
        (["--grid", "--config_file", "fsdp.yaml"], "--config_file fsdp.yaml has no effect with --grid"),
        (["--grid", "nowhere.py"], "The script 'nowhere.py' does not exist"),
    ],
)
def test_what_cannot_be_asked_for(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, "test", *words)
