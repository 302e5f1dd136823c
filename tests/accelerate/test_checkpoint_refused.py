"""A checkpoint that does not fit changes nothing; an object that refuses its state is named, with what was loaded before it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_ops.files.serialization import load
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from tests.support.ranks import ranks


class Own:
    """A registered object."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.tensor = torch.full((2,), value)
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.refuses:
            raise KeyError("not today")
        self.tensor.copy_(state["tensor"])


class OwnWay(nn.Linear):
    """A model that only itself knows how to load, and that finds out late what it cannot."""

    refuses = False

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(state, *args, **kwargs)
        if self.refuses:
            raise RuntimeError("not this one")
        return result


class Run:
    """A run with one of everything, after two steps."""

    def __init__(self, seed: int, *, optimizer: Any = torch.optim.AdamW, groups: int = 1, width: int = 3) -> None:
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
        )
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, width), OwnWay(width, 1)
        parameters = [*self.first.parameters(), *self.second.parameters()]
        parted = [{"params": parameters[index::groups]} for index in range(groups)]
        self.own, self.module = Own(seed), nn.Linear(2, 2)
        torch_optimizer = optimizer(parted, lr=seed / 100)
        scheduler = torch.optim.lr_scheduler.StepLR(torch_optimizer, 5)
        loader = DataLoader(torch.arange(8.0), shuffle=True, batch_size=2)
        self.models = self.accelerator.prepare(self.first, self.second)
        self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(torch_optimizer, scheduler, loader)
        self.accelerator.register_for_checkpointing(self.own, self.module)
        for _ in range(2):
            for _ in self.loader:
                pass
            self.accelerator.backward(self.models[1](self.models[0](torch.randn(4, 3))).sum())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.accelerator.step = seed

    def everything(self) -> dict[str, Any]:
        """All that a load could change, copied."""
        sampler = self.loader.get_sampler()
        return copy.deepcopy({
            "weights": [self.first.state_dict(), self.second.state_dict()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "own": [self.own.value, self.own.tensor, self.module.state_dict()],
            "order": [sampler.initial_seed, sampler.epoch, self.loader.iteration],
            "random": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
            "step": self.accelerator.step,
        })  # fmt: skip


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def changed(run: Run, before: dict[str, Any]) -> list[str]:
    after = run.everything()
    return [name for name in before if not same(before[name], after[name])]


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change what a file of a checkpoint holds, as if it had been saved so."""

    def spoil(folder: Path) -> None:
        state = load(folder / name)
        change(state)
        put(name, state)(folder)

    return spoil


def put(name: str, state: Any) -> Callable[[Path], None]:
    """Have a file of a checkpoint hold something else."""

    def spoil(folder: Path) -> None:
        torch.save(state, folder / name)
        (folder / "manifest.json").unlink(missing_ok=True)

    return spoil


def nothing(folder: Path) -> None:
    pass


def refuse_own(run: Run) -> None:
    run.own.refuses = True


def refuse_model(run: Run) -> None:
    run.second.refuses = True


def set_first(key: str, value: Any) -> Callable[[Any], Any]:
    return lambda state: state["state"][0].__setitem__(key, value)


OWN, OBJECTS, ALL = "own random", "scheduler own order random", "weights optimizer scheduler own order random"
NOTES = {
    OWN: "Loaded before this error, the last one perhaps in part: registered object 0 (Own). The rest did not change.",
    OBJECTS: "registered object 0 (Own), registered object 1 (Linear), scheduler 0, data loader 0. The rest",
    ALL: "registered object 0 (Own), registered object 1 (Linear), scheduler 0, data loader 0, optimizers and models. The",
}
OPTIMIZER = "optimizer.bin"
SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "optimizer without its parts": (put(OPTIMIZER, {"steps": 3}), "is not the state of an optimizer.*'steps'"),
    "optimizer that is a list": (put(OPTIMIZER, [1]), "holds a list"),
    "no parameter groups": (
        edit(OPTIMIZER, lambda state: state.update(param_groups=[])),
        "is not the state of an optimizer",
    ),
    "group without params": (edit(OPTIMIZER, lambda state: state["param_groups"][0].pop("params")), "'params'"),
    "group without betas": (edit(OPTIMIZER, lambda state: state["param_groups"][0].pop("betas")), "needs 'betas'"),
    "rate that is text": (
        edit(OPTIMIZER, lambda state: state["param_groups"][0].update(lr="x")),
        "'lr'.*not a number",
    ),
    "value that is text": (edit(OPTIMIZER, set_first("exp_avg", "x")), "'exp_avg' of parameter 0 is a str"),
    "value of another shape": (edit(OPTIMIZER, set_first("exp_avg_sq", torch.ones(7))), r"of shape \(7,\)"),
    "values that are none": (edit(OPTIMIZER, lambda state: state["state"].update({0: 3})), "is a int, not a dict"),
    "one moment missing": (edit(OPTIMIZER, lambda state: state["state"][0].pop("exp_avg_sq")), "needs 'exp_avg_sq'"),
    "sampler without epoch": (edit("sampler.bin", lambda state: state.update(epoch="x")), "'epoch' is 'x'"),
    "sampler without iteration": (edit("sampler.bin", lambda state: state.pop("iteration")), "'iteration' is None"),
    "scheduler that is none": (put("scheduler.bin", "x"), "holds a str"),
    "step that is text": (edit("random_states_0.pkl", lambda state: state.update(step="x")), "step is 'x'"),
    "own state without a key": (edit("custom_checkpoint_0.pkl", lambda state: state.pop("tensor")), "tensor"),
    "own state of another shape": (
        edit("custom_checkpoint_0.pkl", lambda state: state.update(tensor=torch.ones(3))),
        "size",
    ),
    "own state that is none": (put("custom_checkpoint_0.pkl", 3), "subscriptable"),
    "module of another shape": (
        edit("custom_checkpoint_1.pkl", lambda state: state.update(weight=torch.ones(3))),
        "registered object 1",
    ),
    "one object too few": (lambda folder: (folder / "custom_checkpoint_1.pkl").unlink(), "1 registered|not complete"),
}
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Run], None], str, str]] = {
    "SGD into AdamW": (
        {"optimizer": torch.optim.SGD},
        lambda run: None,
        "of this run is SGD, which needs 'momentum'",
        "",
    ),
    "other groups": ({"groups": 2}, lambda run: None, "1 parameter groups with 4 .* has 2 with 2, 2", ""),
    "other shapes": ({"width": 4}, lambda run: None, r"is \(3, 3\)|of shape \(3, 3\)", ""),
    "own object that refuses": ({}, refuse_own, "not today", OWN),
    "model that refuses": ({}, refuse_model, "not this one", ALL),
}


def check_refused(run: Run, folder: Path, message: str, may_change: str = "") -> None:
    """Only what the note of the error names has changed."""
    before = run.everything()
    with pytest.raises(Exception, match=f"(?s){message}") as caught:
        run.accelerator.load_state(folder)
    assert {*changed(run, before)} <= {*may_change.split()}
    assert (NOTES[may_change] in "".join(getattr(caught.value, "__notes__", []))) if may_change else True


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_checkpoint_changes_nothing_that_is_not_named(name: str, tmp_path: Path) -> None:
    spoil, message = SPOILED[name]
    Run(3).accelerator.save_state(tmp_path / "state")
    spoil(tmp_path / "state")
    check_refused(Run(5), tmp_path / "state", message, OWN if name.startswith("own") else "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_does_not_take_it_changes_nothing_that_is_not_named(name: str, tmp_path: Path) -> None:
    options, prepare, message, may_change = REFUSED[name]
    Run(3).accelerator.save_state(tmp_path / "state")
    run = Run(5, **options)
    prepare(run)
    check_refused(run, tmp_path / "state", message, may_change)


def test_what_all_is_compared_does_change_when_it_loads(tmp_path: Path) -> None:
    saved = Run(3)
    saved.accelerator.save_state(tmp_path / "state")
    wanted = saved.everything()
    run = Run(5)
    assert set(changed(run, wanted)) == set(wanted)
    run.accelerator.load_state(tmp_path / "state")
    assert changed(run, wanted) == []


def test_malformed_random_states_are_left_out_in_full(tmp_path: Path) -> None:
    Run(3).accelerator.save_state(tmp_path / "state")
    edit("random_states_0.pkl", lambda state: state.update(torch_manual_seed=torch.ones(3)))(tmp_path / "state")
    run = Run(5)
    before = run.everything()
    with pytest.warns(UserWarning, match="RNG states of the checkpoint were not restored"):
        run.accelerator.load_state(tmp_path / "state")
    assert "random" not in changed(run, before)


OTHERS = [
    (torch.optim.SGD, torch.optim.AdamW, "of this run is AdamW, which needs 'betas'.*'momentum'"),
    (torch.optim.RMSprop, torch.optim.AdamW, "of this run is AdamW, which needs 'betas'.*'alpha'"),
    (torch.optim.AdamW, torch.optim.SGD, "of this run is SGD, which needs 'momentum'.*'betas'"),
    (torch.optim.Adagrad, torch.optim.Adam, "of this run is Adam, which needs 'betas'.*'lr_decay'"),
    (torch.optim.Adamax, torch.optim.Adam, "needs 'exp_avg_sq'"),
]


def stepped(kind: Any, **options: Any) -> Any:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = kind([parameter], lr=0.1, **options)
    parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


@pytest.mark.takes_turns
@pytest.mark.sample(2)
@pytest.mark.parametrize(("saved", "now", "message"), OTHERS)
def test_the_state_of_another_optimizer_is_refused(saved: Any, now: Any, message: str, tmp_path: Path) -> None:
    for kind, act in ((saved, "save_state"), (now, "load_state")):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(stepped(kind))
        if act == "save_state":
            accelerator.save_state(tmp_path / "state")
        else:
            with pytest.raises(ValueError, match=message):
                accelerator.load_state(tmp_path / "state")
        accelerator.free_memory()


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody's, with a hyperparameter that its older versions did not have."""

    def __init__(self, params: Any, lr: float, *, cautious: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "cautious": cautious})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.zeros(5)


class OneOfItsOwn(torch.optim.SGD):
    """It keeps its state in a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"packed": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.packed = state["packed"]


def forget(*names: str) -> Callable[[Path], None]:
    def change(state: Any) -> None:
        for group in state["param_groups"]:
            for name in names:
                group.pop(name)

    return edit(OPTIMIZER, change)


def add_to_groups(**values: Any) -> Callable[[Path], None]:
    return edit(OPTIMIZER, lambda state: [group.update(values) for group in state["param_groups"]])


@pytest.mark.takes_turns
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("saved", "now", "change"),
    [
        (torch.optim.AdamW, torch.optim.AdamW, forget("foreach", "maximize", "capturable", "differentiable", "fused")),
        (torch.optim.AdamW, torch.optim.AdamW, forget("decoupled_weight_decay", "amsgrad")),
        (torch.optim.AdamW, torch.optim.Adam, nothing),
        (torch.optim.AdamW, torch.optim.AdamW, add_to_groups(initial_lr=0.1, max_lr=0.2, layer="a", fancy_flag=True)),
        (torch.optim.SGD, torch.optim.SGD, forget("foreach", "maximize", "differentiable", "fused")),
        (Lion, Lion, forget("cautious")),
        (Lion, Lion, nothing),
        (OneOfItsOwn, OneOfItsOwn, nothing),
    ],
)
def test_states_of_older_versions_and_other_peoples_optimizers_load(
    saved: Any, now: Any, change: Callable[[Path], None], tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(stepped(saved))
    accelerator.save_state(tmp_path / "state")
    change(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare(stepped(now))
    accelerator.load_state(tmp_path / "state")


def test_the_state_of_another_scheduler_is_said(tmp_path: Path) -> None:
    Run(3).accelerator.save_state(tmp_path / "state")
    run = Run(3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer.optimizer, 10)
    run.scheduler.scheduler = scheduler
    with pytest.warns(UserWarning, match=r"another scheduler than CosineAnnealingLR: it has .*'step_size' .*'T_max'"):
        run.accelerator.load_state(tmp_path / "state")


@ranks(2)
@pytest.mark.parametrize("what", ["own", "model", "optimizer", "hook"])
def test_one_rank_that_refuses_ends_the_load_on_all(rank: int, what: str, tmp_path: Path) -> None:
    saved = Run(3)
    saved.accelerator.save_state(tmp_path / "state")
    run = Run(5)

    def hook(models: Any, folder: str) -> None:
        raise RuntimeError("not with this hook")

    if rank == 1:
        if what == "own":
            refuse_own(run)
        elif what == "model":
            refuse_model(run)
        elif what == "hook":
            run.accelerator.register_load_state_pre_hook(hook)
        else:
            run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    check_refused(
        run,
        tmp_path / "state",
        "Process 1 could not" if rank == 0 else "not|parameter groups",
        {"model": ALL, "own": OWN if rank else OBJECTS}.get(what, ""),
    )
