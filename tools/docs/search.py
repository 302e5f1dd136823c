"""The search of the site: what readers type finds the page that answers, guides before reference pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tools.docs import evidence

# fmt: off
# page -> what people type who want it, where neither its title nor its headings have the words
WORDS = {
    "checkpoints.md": [
        "resume", "resume training", "continue a run", "save checkpoint", "load checkpoint", "save model", "safetensors",
    ],
    "compatibility.md": ["transformers", "Trainer", "trl", "peft", "diffusers", "LoRA"],
    "concepts/comparing-performance.md": [
        "learning rate", "seed", "random seed", "reproducibility", "reproducible", "warmup", "throughput", "set_seed",
    ],
    "config.md": ["accelerate config", "default_config.yaml"],
    "data.md": ["dataset", "dataloader", "DataLoader", "shuffle", "num_workers", "sampler", "streaming", "IterableDataset"],
    "deepspeed.md": ["DeepSpeed ZeRO", "ZeRO 1", "ZeRO 2", "ZeRO 3"],
    "estimate.md": ["how much memory", "VRAM"],
    "examples.md": ["sample code", "example script", "image classification"],
    "how-to/distributed-inference.md": ["inference", "generate", "predict", "prompts"],
    "how-to/gradient-accumulation.md": ["effective batch size", "global batch size", "clip gradients", "gradient clipping"],
    "how-to/kubernetes.md": ["k8s", "Kubeflow"],
    "how-to/mps.md": ["macbook", "mac", "M1", "M2", "M3", "Apple silicon", "Metal"],
    "how-to/out-of-memory.md": ["OOM", "OutOfMemoryError", "activation checkpointing", "gradient checkpointing"],
    "how-to/processes.md": ["print once", "main process", "rank 0", "early stopping", "barrier", "unwrap model", "logger"],
    "how-to/profiler.md": ["training is slow", "slow training", "bottleneck", "GPU utilization"],
    "how-to/several-gpus.md": ["multiple GPUs", "multi-GPU", "DDP", "CUDA_VISIBLE_DEVICES", "data parallel"],
    "how-to/several-machines.md": ["multi-node", "multinode", "nodes", "multiple machines", "two machines"],
    "how-to/low-precision.md": ["mixed precision", "autocast", "AMP", "half precision", "float16", "bf16", "fp16"],
    "hangs-and-crashes.md": ["NCCL timeout", "deadlock", "stuck", "hang", "training hangs", "SIGTERM", "segfault"],
    "large-models.md": ["load pretrained", "from_pretrained", "offload", "CPU offload", "model too large"],
    "launch.md": ["accelerate launch", "torchrun"],
    "migrating.md": ["Hugging Face", "upgrade"],
    "quantization.md": ["8-bit", "4-bit", "QLoRA", "int8"],
    "sharded-training.md": ["fully sharded data parallel", "ZeRO", "wrapping policy"],
    "start/first-script.md": ["quickstart", "tutorial", "hello world", "getting started"],
    "start/from-pytorch.md": [
        "validation", "evaluation", "freeze layers", "fine-tune", "fine-tuning", "training loop", "lr scheduler", "metrics",
    ],
    "start/install.md": ["pip install", "installation", "CPU-only torch"],
    "start/notebooks.md": ["Jupyter", "Colab", "Kaggle", "notebook_launcher"],
    "tracking.md": ["wandb", "TensorBoard", "MLflow", "logging", "progress bar", "log loss"],
    "troubleshooting.md": [
        "nan loss", "loss is nan", "error message", "RuntimeError", "ValueError", "unused parameters",
        "Missing key(s) in state_dict", "object has no attribute", "Address already in use", "EADDRINUSE",
    ],
    "whats-new.md": ["changelog", "release notes", "releases"],
}
# fmt: on
BOOSTS = [  # of the first pattern that matches a page's path: how much its matches count
    (r"reference/(commands|config-file|environment|accelerate\.md)", 1.0),
    (r"reference/", 0.05),
    (r"(architecture|compatibility|first-change|performance|reliability|contributing|concepts/internals)", 0.2),
    (r"", 4.0),
]
WORKER = re.compile(r"assets/javascripts/(workers/search\.\w+\.min\.js)")
OPTION = re.compile(r'<dt><a id="([^"]+)"></a>(.+?)</dt>\s*<dd>(.*?)</dd>', re.DOTALL)
OPTION_PAGES = ("reference/commands/", "reference/config-file/", "reference/environment/")
CODE = re.compile(r"<code>([^<]+)</code>")
TAG = re.compile(r"<[^>]+>")
OPTION_BOOST = 4.0
QUERIES = """// Rewrites what is typed before the search of the theme parses it, where `--flag` would mean "without flag"
const QUERY = 2
addEventListener("message", event => {
  const { type, data, isPlain } = event.data
  if (type !== QUERY || isPlain) return
  event.stopImmediatePropagation()
  const plain = data.replace(/(^|\\s)[-+]+/g, "$1").replace(/[*:^~]+/g, " ")
  dispatchEvent(new MessageEvent("message", { data: { type, data: plain, isPlain: true } }))
})
importScripts("%s")
"""


def page_settings(path: str) -> dict[str, object]:
    """The metadata that the search plugin reads.

    Args:
        path: Of the page, relative to docs/.
    """
    if path == evidence.PATH:  # for contributors, who know where it is
        return {"search": {"exclude": True}}
    boost = next(boost for pattern, boost in BOOSTS if re.match(pattern, path))
    return {"search": {"boost": boost}, "tags": WORDS.get(path, [])}


def use_plain_queries(html: str) -> str:
    """A page whose search asks through `workers/queries.js`."""
    return WORKER.sub("assets/javascripts/workers/queries.js", html)


def add_options(site: Path) -> None:
    """Add each flag, key and variable of the reference to the index: they are no headings, which the search plugin takes."""
    path = site / "search" / "search_index.json"
    index = json.loads(path.read_text())
    pages = {entry["location"] for entry in index["docs"] if entry["location"].startswith(OPTION_PAGES)}
    for page in sorted(location for location in pages if "#" not in location):
        index["docs"].extend(_options(page, (site / page / "index.html").read_text()))
    path.write_text(json.dumps(index, separators=(",", ":")))


def _options(page: str, html: str) -> Iterator[dict[str, object]]:
    for anchor, names, text in OPTION.findall(html):
        title = ", ".join(CODE.findall(names))
        yield {"location": f"{page}#{anchor}", "title": title, "text": TAG.sub("", text), "boost": OPTION_BOOST}


def write_queries(site: Path) -> None:
    """Write that script beside the worker of the theme, whose name has a hash in it."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    worker.with_name("queries.js").write_text(QUERIES % worker.name)
