"""FP8 with torchao under DDP."""

from fp8_curves import Step, compare, convert_by_hand, make_model, make_optimizer, stepping, under_autocast
from torch.nn.parallel import DistributedDataParallel

from accelerate import PartialState


def by_hand() -> Step:
    """Convert the model, then wrap it."""
    model = DistributedDataParallel(convert_by_hand(make_model()).to(PartialState().device))
    return stepping(under_autocast(model), make_optimizer(model))


if __name__ == "__main__":
    compare(by_hand)
