"""Small functions, folders of checkpoints and plugins answer as in accelerate 1.15."""

from __future__ import annotations

from tests.differential.running import needs_reference, same

pytestmark = needs_reference


def test_small_things() -> None:
    intended = {
        "compare_versions *1.2.3+cpu*": "the build of a version does not make it another one",
        "port as text": "a port from the environment is text",
        "handler 6": "accumulation can average over more than steps, so there is one field more",
        "to_dict 6": "the same",
        "handler 7": "copies of batches wait for nothing that is pinned unless they are told to",
        "set_directories": "a signal can be answered with a save, so there are two fields more",
        "fsdp *": "sharded training works on CPUs, where 1.15 cannot make the plugin, and memory is not pinned there",
        "accumulation 0": "no accumulation over no steps",
        "mixed_precision fp8": "the missing library is named as such, an ImportError",
        "mixed_precision NO": "names of number formats are one spelling inside",
        "mixed_precision half": "a format that does not exist is refused; 1.15 trains on in full precision",
    }
    same("small_things", intended=intended, least=1_500)
