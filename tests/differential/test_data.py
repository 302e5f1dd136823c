"""Every process gets the same samples in the same order as with accelerate 1.15."""

from __future__ import annotations

from tests.differential.running import needs_reference, same

pytestmark = needs_reference


def test_shares_of_every_kind_of_loader() -> None:
    intended = {
        "total_batch_size stream *": "streams are read by all processes, which 1.15 does not count",
        "prepare_data_loader unbatched *": "batch_size=None cannot be shared out: said, instead of a TypeError later",
        "skip_first_batches unbatched *": "batch_size=None cannot be shared out: said, instead of a TypeError later",
        "SkipBatchSampler *": "nothing is left when more is skipped than there is; 1.15 has a negative length",
        "left over unbatched *": "the same; here the error is there before there is a loader",
        "left over *": "nothing is left when more is skipped than there is; 1.15 has a negative length",
        "accelerator stream size=1 * drop_last=True": "a stream without a whole batch has none; 1.15 raises",
        "accelerator stream size=[58] * drop_last=True": "after that error, 1.15 believes to be in its loader for ever",
    }
    same("data_sharing", intended=intended, least=16_000)


def test_loops_of_two_processes() -> None:
    intended = {
        "remainders *": "a dispatcher of known length knows its remainder from the first round on",
        "remainder stream *": "a stream's remainder is known once it has ended",
        "gathered stream *": "so nothing that was filled up comes back from gather_for_metrics",
        "remainder skipped dispatch=False *": "skipping the first batches does not change the remainder",
        "gathered skipped dispatch=False *": "so nothing that was filled up comes back from gather_for_metrics",
        "* skipped dispatch=True *": "a step of all processes is one round of a dispatcher; 1.15 skips half of it",
    }
    same("data_on_ranks", world=2, intended=intended, least=4_000)
