"""The checks of `accelerate test` on a pretended GPU, as one task."""

from __future__ import annotations

import contextlib
import io

from tests.cuda_shapes.pretended_group import launch
from tests.cuda_shapes.recorder import Recorder


def run(is_launched: bool, folder: str) -> dict[str, object]:
    """Run all checks in this process, which may be the only rank of a launch; what they printed."""
    from accelerate.test_utils.scripts import test_script

    if is_launched:
        launch(1, local_rank=0)
    output, complaints = io.StringIO(), io.StringIO()
    with Recorder(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(complaints):
        status = test_script.main()
    return {"status": status, "output": output.getvalue(), "complaints": complaints.getvalue()}
