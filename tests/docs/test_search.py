"""What people type into the search of the site finds the page that answers, in a real browser without a window.

`uv run tools/dev.py docs` builds the site and then runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from shutil import which
from threading import Thread
from typing import Any

import pytest

from tools.docs import evidence

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
BROWSER = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif("LIBRARIES_REQUIRED" not in os.environ, reason="the site may be an old one: tools/dev.py docs"),
    pytest.mark.skipif(BROWSER is None, reason="needs chromium"),
]

ANSWERS = {
    "--num_processes": "reference/commands/launch/",
    "--mixed_precision": "reference/commands/launch/",
    "--fsdp_version": "reference/commands/launch/",
    "OOM": "how-to/out-of-memory/",
    "out of memory": "how-to/out-of-memory/",
    "CUDA out of memory": "how-to/out-of-memory/",
    "resume": "checkpoints/",
    "resume training": "checkpoints/",
    "continue a run": "checkpoints/",
    "save checkpoint": "checkpoints/",
    "NCCL timeout": "hangs-and-crashes/",
    "deadlock": "hangs-and-crashes/",
    "training hangs": "hangs-and-crashes/",
    "multiple gpus": "how-to/several-gpus/",
    "multi-gpu": "how-to/several-gpus/",
    "train on 4 gpus": "how-to/several-gpus/",
    "multi node": "how-to/several-machines/",
    "two machines": "how-to/several-machines/",
    "bf16": "how-to/low-precision/",
    "mixed precision": "how-to/low-precision/",
    "gradient accumulation": "how-to/gradient-accumulation/",
    "gather_for_metrics": "reference/accelerate/",
    "Accelerator.prepare": "reference/accelerate/",
    "fsdp": "sharded-training/",
    "deepspeed zero 3": "deepspeed/",
    "wandb": "tracking/",
    "jupyter": "start/notebooks/",
    "windows": "platforms/",
    "mac m1": "how-to/mps/",
    "slurm": "slurm/",
    "CUDA_VISIBLE_DEVICES": "how-to/several-gpus/",
    "how much memory does my model need": "estimate/",
    "torch.compile": "how-to/compile/",
    "deprecated": "versions/",
    "changelog": "whats-new/",
    "batch size": "how-to/batch-size/",
    "ACCELERATE_MIXED_PRECISION": "reference/environment/",
    "install": "start/install/",
    "clip_grad_norm_": "reference/accelerate/",
    "tensorboard": "tracking/",
    "k8s": "how-to/kubernetes/",
    "tpu": "tpu/",
    "shuffle": "data/",
    "accelerate launch": "launch/",
    "config file": "config/",
    "tensor parallel": "parallelism/",
    "device_map": "large-models/",
    "freeze layers": "start/from-pytorch/",
    "nan loss": "troubleshooting/",
    "loss is nan": "troubleshooting/",
    "learning rate": "concepts/comparing-performance/",
    "validation": "start/from-pytorch/",
    "evaluation": "start/from-pytorch/",
    "load pretrained": "large-models/",
    "from_pretrained": "large-models/",
    "seed": "concepts/comparing-performance/",
    "reproducible": "concepts/comparing-performance/",
    "early stopping": "how-to/processes/",
    "print once": "how-to/processes/",
    "unwrap model": "how-to/processes/",
    "gradient clipping": "how-to/gradient-accumulation/",
    "effective batch size": "how-to/gradient-accumulation/",
    "gradient checkpointing": "how-to/out-of-memory/",
    "quickstart": "start/first-script/",
    "tutorial": "start/first-script/",
    "inference": "how-to/distributed-inference/",
    "generate": "how-to/distributed-inference/",
    "slow training": "how-to/profiler/",
    "profiler": "how-to/profiler/",
    "save model": "checkpoints/",
    "load checkpoint": "checkpoints/",
    "num_workers": "data/",
    "streaming": "data/",
    "LoRA": "compatibility/",
    "8-bit": "quantization/",
    "offload": "large-models/",
    "torchrun": "launch/",
    "zero": "sharded-training/",
    "lr scheduler": "start/from-pytorch/",
    "fine-tune": "start/from-pytorch/",
    "log loss": "tracking/",
    "Expected to have finished reduction": "troubleshooting/",
    "mat1 and mat2 must have the same dtype": "troubleshooting/",
    "Missing key(s) in state_dict": "troubleshooting/",
    "Address already in use": "troubleshooting/",
    "object has no attribute": "troubleshooting/",
    "mixed torch.Tensor and DTensor": "troubleshooting/",
    "Expected all tensors to be on the same device": "troubleshooting/",
    "unused parameters": "troubleshooting/",
    "kaggle": "start/notebooks/",
    "local sgd": "how-to/local-sgd/",
    "communication hook": "how-to/communication-hooks/",
}
PROBE = """<!doctype html><iframe width="1200" height="900"></iframe><script type="module">
const site = document.querySelector("iframe")
const loaded = address => new Promise(done => { site.onload = done; site.src = address })
const until = async look => { for (;;) { const value = look(); if (value) return value; await new Promise(again => setTimeout(again, 20)) } }
await loaded("/index.html")
const config = JSON.parse(site.contentDocument.querySelector("#__config").textContent)
const worker = new Worker("/" + config.search)
const index = await (await fetch("/search/search_index.json")).json()
const answer = message => new Promise(done => { worker.onmessage = event => done(event.data.data); worker.postMessage(message) })
await answer({ type: 0, data: { ...index, options: { suggest: false } } })
const found = {}
for (const query of QUERIES) {
  const { items } = await answer({ type: 2, data: query })
  found[query] = items.slice(0, 8).map(group => [group[0].location.split("#")[0], group[0].score])
}
await loaded("/index.html?q=--num_processes")
const shown = await until(() => site.contentDocument.querySelector(".md-search-result__link")?.href)
await fetch("/report", { method: "POST", body: JSON.stringify({ found, shown }) })
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, the page that probes it, and takes what that page reports."""

    def __init__(self, reports: Queue[Any], *args: Any, **kwargs: Any) -> None:
        self.reports = reports
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        if self.path != "/probe":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PROBE.replace("QUERIES", json.dumps(list(ANSWERS))).encode())
        return None

    def do_POST(self) -> None:
        self.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What the search answers: the pages of each query, best first, and the first address that the site's own box shows."""
    reports: Queue[Any] = Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, reports, directory=str(SITE)))
    Thread(target=server.serve_forever, daemon=True).start()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]
    address = f"http://127.0.0.1:{server.server_port}/probe"
    browser = subprocess.Popen([str(BROWSER), *flags, "--remote-debugging-port=0", address], stderr=subprocess.DEVNULL)
    try:
        yield reports.get(timeout=90)
    finally:
        browser.terminate()
        browser.wait()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("query", "page"), ANSWERS.items())
def test_the_right_page_is_among_the_first_three(report: Any, query: str, page: str) -> None:
    first = [address for address, _ in report["found"][query][:3]]
    assert page in first


def test_the_page_for_contributors_is_not_found() -> None:
    index = json.loads((SITE / "search" / "search_index.json").read_text())
    assert not [entry for entry in index["docs"] if entry["location"].startswith(evidence.PATH.removesuffix(".md"))]


def test_the_box_of_the_site_finds_a_flag(report: Any) -> None:
    assert "/reference/commands/launch/" in report["shown"]
