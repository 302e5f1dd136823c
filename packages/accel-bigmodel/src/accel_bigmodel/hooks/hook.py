"""Hooks that run before and after the forward pass of a module, and how they are added and removed."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from typing_extensions import override

from accel_bigmodel.model_methods import remove_methods
from accel_state.public_names import known_as

Module = TypeVar("Module", bound=nn.Module)


@known_as("accelerate.hooks.ModelHook")
class ModelHook:
    """Runs around the forward pass of a module. Subclasses override what they need.

    Attributes:
        no_grad (`bool`): Whether the forward pass runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: Module) -> Module:
        """Called when the hook is added to a module; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward pass with its arguments; returns those to use."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward pass with its result; returns the one to use."""
        return output

    def detach_hook(self, module: Module) -> Module:
        """Called when the hook is removed; returns the module."""
        return module


@known_as("accelerate.hooks.SequentialHook")
class SequentialHook(ModelHook):
    """Several hooks, one after the other.

    Args:
        hooks: The hooks.
    """

    hooks: tuple[ModelHook, ...]

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    @override
    def init_hook(self, module: Module) -> Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments through all hooks in order."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @override
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through all hooks in order."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    @override
    def detach_hook(self, module: Module) -> Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def hooks_of(module: nn.Module) -> Iterator[ModelHook]:
    """The hooks of a module, one by one, in the order in which they run.

    Args:
        module: The module.
    """
    pending = [hook] if (hook := getattr(module, "_hf_hook", None)) is not None else []
    while pending:
        hook = pending.pop()
        if isinstance(hook, SequentialHook):
            pending.extend(reversed(hook.hooks))
        else:
            yield hook


def add_hook_to_module(module: Module, hook: ModelHook, append: bool = False) -> Module:
    """Add a hook to a module.

    Args:
        module: The module; other libraries find the hook as its `_hf_hook`, and the old forward as `_old_forward`.
        hook: The hook.
        append (`bool`): Run it after existing hooks, instead of replacing them.

    Returns:
        The module.
    """
    before = getattr(module, "_hf_hook", None)
    if before is not None and append:
        _detach(module)
        hook = SequentialHook(before, hook)
    elif before is not None:
        _restore_forward(module)
    old_forward = module.forward
    module = hook.init_hook(module)
    module._hf_hook, module._old_forward = hook, old_forward  # type: ignore[assignment]
    if any(getattr(attached, "offload", False) for attached in hooks_of(module)):
        hooked = functools.partial(_forward_in_turn, module, _Turn())
    else:
        hooked = functools.partial(_hooked_forward, module)
    functools.update_wrapper(hooked, old_forward)
    if _is_traced(module):  # a class of its own, whose `forward` is the one that is called
        type(module).forward = staticmethod(hooked)  # newer Pythons bind a partial function of a class
    else:
        module.forward = hooked
    return module


class _Turn:
    """The lock of a module that one thread at a time runs. A copy of the module has its own."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _turns.add(self)

    def __reduce__(self) -> Any:
        return type(self), ()


_turns: WeakSet[_Turn] = WeakSet()


def _renew_locks() -> None:
    for turn in _turns:
        turn.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_locks)  # the threads that held them are not there


def _forward_in_turn(module: nn.Module, turn: _Turn, *args: Any, **kwargs: Any) -> Any:
    """One thread at a time: another one would take the weights away that this one computes with."""
    if torch.compiler.is_compiling():
        return _hooked_forward(module, *args, **kwargs)
    with turn.lock:
        return _hooked_forward(module, *args, **kwargs)


def _hooked_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    hook: Any = module._hf_hook
    compiling = torch.compiler.is_compiling()
    args, kwargs = (_untraced_pre if compiling else _pre)(hook, module, args, kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)  # type: ignore[operator]
    else:
        output = module._old_forward(*args, **kwargs)  # type: ignore[operator]
    return (_untraced_post if compiling else _post)(hook, module, output)


def _pre(hook: ModelHook, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return hook.pre_forward(module, *args, **kwargs)


def _post(hook: ModelHook, module: nn.Module, output: Any) -> Any:
    return hook.post_forward(module, output)


_untraced_pre: Any = torch._disable_dynamo(_pre)  # the compiled graph has the weights as inputs, not their loading
_untraced_post: Any = torch._disable_dynamo(_post)


def remove_hook_from_module(module: Module, recurse: bool = False) -> Module:
    """Remove the hook of a module, and the methods that dispatching or offloading gave it.

    Args:
        module: The module.
        recurse (`bool`): Remove the hooks of all submodules too.

    Returns:
        The module.
    """
    _detach(module)
    remove_methods(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def _detach(module: nn.Module) -> None:
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
        del module._hf_hook
    _restore_forward(module)


def _restore_forward(module: nn.Module) -> None:
    old: Any = module.__dict__.pop("_old_forward", None)
    if old is None:
        return
    if _is_traced(module):
        type(module).forward = old
    elif getattr(old, "__func__", None) is getattr(type(module), "forward", None):
        del module.forward  # so that the method of the class is called
    else:
        module.forward = old


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and all its submodules."""
    remove_hook_from_module(module, recurse=True)


def _is_traced(module: nn.Module) -> bool:
    return "GraphModuleImpl" in str(type(module))
