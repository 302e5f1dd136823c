"""Names of parameters as the user's model gives them."""

from __future__ import annotations

WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """The name of a parameter or module without what wrappers inside the model add."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name
