"""Nested structures and collectives give what accelerate 1.15 gives."""

from __future__ import annotations

from tests.differential.running import needs_reference, same

pytestmark = needs_reference


def test_functions_that_walk_through_structures() -> None:
    intended = {
        "find_batch_size *": "a tensor without dimensions is named in a ValueError; 1.15 has an IndexError",
        "edge find_batch_size scalar": "the same",
        "ignorant_find_batch_size *": "None is the answer for it, too, which 1.15's IndexError escapes",
        "edge ignorant scalar": "the same",
        "pad_input_dim *": "other dimensions than the first can be filled up; 1.15 raises or mixes up sizes",
        "edge pad_input *": "a tensor whose size is not the batch's is no part of the batch",
        "edge pad defaultdict": "a defaultdict is rebuilt as one",
    }
    same("structures", intended=intended, least=9_000)


def test_collectives_of_two_processes() -> None:
    intended = {
        "reduce * mean *": "integers have a mean; 1.15 raises",
        "accelerator_reduce *": "the same",
        "gather_for_metrics dict": "the structure stays; 1.15 returns its keys",
        "reduce * none *": "nothing is reduced, as it is documented; 1.15 sums",
        "accelerator_pad *": "booleans stay booleans; in 1.15 only on the process that has most, so that gathering hangs",
        "split tuple True": "a tuple is filled up as a tuple; 1.15 raises",
        "split empty True": "nothing is shared out as nothing; 1.15 raises",
        "split dict True": "nothing of a dict is lost; 1.15 counts keys for items",
        "split nested *": "the same",
        "facts": "the device is what tensors say of theirs, cpu, not cpu:0",
    }
    same("collectives", world=2, intended=intended, least=4_000)
