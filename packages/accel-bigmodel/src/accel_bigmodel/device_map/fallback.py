"""A part that fits where the next one in order does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accel_bigmodel.device_map.parts import Part, can_be_taken_apart, is_inside, parts_of
from accel_bigmodel.sizes import convert_file_size_to_int


def fallback_allocate(
    modules: Sequence[tuple[str, Part]],
    module_sizes: Mapping[str, int],
    size_limit: float | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Part | None, list[tuple[str, Part]]]:
    """Find a part that fits into what is left, taking larger ones apart; parts that share parameters are left alone.

    Args:
        modules: Names and parts, in order.
        module_sizes: Bytes by name.
        size_limit: Bytes that are left.
        no_split_module_classes: Names of classes that are not taken apart.
        tied_parameters: What `find_tied_parameters` gave.

    Returns:
        Name and part, both None when nothing fits, and all other parts in order.
    """
    limit = convert_file_size_to_int(size_limit)
    whole = set(no_split_module_classes or ())
    shared = [name for group in tied_parameters or () for name in group]

    def fits(name: str) -> bool:
        return module_sizes.get(name, 0) <= limit and not any(is_inside(other, name) for other in shared)

    def search(parts: Sequence[tuple[str, Part]]) -> list[tuple[str, Part]] | None:
        """The parts, of which the one that fits comes first and those around it are taken apart."""
        for position, (name, part) in enumerate(parts):
            others = [*parts[:position], *parts[position + 1 :]]
            if fits(name):
                return [(name, part), *others]
            if can_be_taken_apart(part, whole):
                inner = search(parts_of(part, name))  # type: ignore[arg-type]
                if inner is not None:
                    return [inner[0], *parts[:position], *inner[1:], *parts[position + 1 :]]
        return None

    found = search(modules)
    if found is None:
        return None, None, list(modules)
    return (*found[0], found[1:])
