"""Each example runs, on one process and on two, and its last line is as good as its docstring says."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from accel_cli.examples.catalog import read_examples
from tests.examples.launched import Run, check, launch

IMAGES = [
    Run("cv_example.py", "epoch 5"),
    Run("sagemaker_example.py --num_epochs 3", "epoch 3", keeps_promise=False),
    Run("sagemaker_example.py", "^epoch 4(.*\n)*epoch 5"),
    Run("cv_example.py --data_dir {here}/pictures --epochs 1", "epoch 1: accuracy", keeps_promise=False),
    Run("complete_cv_example.py --checkpointing_steps epoch --with_tracking"),
    Run("complete_cv_example.py --resume --epochs 7", "resumed after batch"),
    Run("complete_cv_example.py --data {here}/images.npz --epochs 1", "epoch 1: accuracy", keeps_promise=False),
    Run("complete_cv_example.py --cpu --data_dir {here}/pictures --epochs 1", "epoch 1: acc", keeps_promise=False),
    Run("by_feature/automatic_gradient_accumulation.py", "batch size 19 x 2 accumulation steps"),
    Run(
        "by_feature/automatic_gradient_accumulation.py --observed_batch_size 64 --epochs 1",
        "batch size 19 x 3 accumulation steps",
        keeps_promise=False,
    ),
    Run("by_feature/checkpointing.py"),
    Run("by_feature/checkpointing.py --resume_from_checkpoint runs/checkpointing/step_100", "resumed after step 100"),
    Run("by_feature/checkpointing.py --cpu --checkpointing_steps epoch --output_dir tutorial"),
    Run("by_feature/checkpointing.py --resume_from_checkpoint tutorial/epoch_0", "resumed after step (45|23)"),
    Run("by_feature/ddp_comm_hook.py"),
    Run("by_feature/ddp_comm_hook.py --mixed_precision fp16 --ddp_comm_hook power_sgd", keeps_promise=False),
    Run("by_feature/early_stopping.py", "stopped after epoch"),
    Run("by_feature/gradient_accumulation.py", "540 micro-batches, 270 optimizer steps|270 micro-batches, 138 opt"),
]
MORE_IMAGES = [
    Run("by_feature/cross_validation.py", "fold 3"),
    Run(
        "by_feature/fsdp_with_peak_mem_tracking.py",
        r"process 0 stores (21,386|10,693) parameters\n.*peak memory \d+ MiB",
    ),
    Run("by_feature/local_sgd.py"),
    Run("by_feature/memory.py", "trying batch size 128\n(.*\n)*trying batch size 46\n"),
]
STILL_MORE_IMAGES = [
    Run("by_feature/multi_process_metrics.py", "(359|384) predictions with padding, 359 without"),
    Run("by_feature/profiler.py --record_shapes --profile_memory --with_flops --output_trace_dir profiler"),
    Run("by_feature/schedule_free.py"),
    Run("by_feature/tracking.py --with_tracking"),
    Run("config_yaml_templates/run_me.py", "process 0 of [12] on cpu"),
    Run("inference/distributed/speech.py", "process 0 has transcribed (21|11) recordings"),
]
RECORDINGS = "0, 'good morning': 1.22 s, mean loudness 0.71(.*\n)*5 recordings\n$"
"""The same on any number of processes: each text has a seed."""
LANGUAGE = [
    Run("nlp_example.py"),
    Run("nlp_example.py --cpu --mixed_precision fp16 --epochs 1", "epoch 1: accuracy", keeps_promise=False),
    Run(
        "nlp_example.py --epochs 1 --data {here}/reviews.csv --model {here}/bert", "epoch 1: acc", keeps_promise=False
    ),
    Run(
        "nlp_example.py --epochs 1 --data_dir {here}/published --model {here}/bert",
        "epoch 1: acc",
        keeps_promise=False,
    ),
    Run("complete_nlp_example.py --data_dir {here}/glue --epochs 15", "epoch 15: accuracy 1.000"),
    Run("complete_nlp_example.py --checkpointing_steps epoch --with_tracking"),
    Run(
        "complete_nlp_example.py --cpu --resume_from_checkpoint {here}/runs/complete_nlp_example/checkpoints/checkpoint_4 "
        "--epochs 6",
        "resumed after batch (125|250)",
    ),
    Run("complete_nlp_example.py --resume --epochs 6", "resumed after batch (125|250)"),
    Run("by_feature/gradient_accumulation_for_autoregressive_models.py"),
    Run("inference/distributed/text.py", "process 0 has continued (25|13) sequences"),
    Run("inference/distributed/text.py --model {here}/gpt2 --prompts the,plot cast music", "the", keeps_promise=False),
    Run("inference/distributed/image.py --output_dir images", "(image .*\n){5}5 images\n$", keeps_promise=False),
    Run("inference/distributed/captions.py", "process 0 has captioned (21|11) pictures"),
    Run(
        "inference/distributed/captions.py --model {here}/blip --data_dir {here}/pictures",
        "process 0 has captioned (40|20) pictures(.*\n)*beagle_0.png: '",
        keeps_promise=False,
    ),
    Run("inference/distributed/speech_generation.py --output_dir spoken", RECORDINGS, keeps_promise=False),
    Run(
        "inference/distributed/speech_generation.py --model {here}/vits --texts_file {here}/texts.txt",
        "process 0 has spoken (3|2) texts(.*\n)*2, 'a b': .*\n3 recordings\n$",
        keeps_promise=False,
    ),
    Run("inference/pippy/bert.py", "process 0 holds (254,784|149,824) parameters"),
    Run("inference/pippy/gpt2.py", "process 0 holds (324,608|174,528) parameters"),
    Run("inference/pippy/llama.py", "process 0 holds (279,360|139,648) parameters"),
    Run("inference/pippy/t5.py", "process 0 holds (345,728|148,160) parameters"),
]
WIKITEXT = "--dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --block_size 128 --learning_rate 5e-4"
LARGE = (
    f"--config_name gpt2-large --tokenizer_name gpt2-large {WIKITEXT} --num_train_epochs 1 --output_dir {{here}}/made "
)
LARGE += "--per_device_train_batch_size 24 --per_device_eval_batch_size 24 --with_tracking --report_to wandb"
"""What accelerate's guides to DeepSpeed and Megatron-LM give the programs, for one epoch."""
STAND_INS = (
    "'wikitext' is not a folder.*numbers that count(.*\n)*'gpt2-large' is not a folder.*a tiny GPT-2(.*\n)*epoch 1:"
)
LANGUAGE_MODELS = [
    Run("by_feature/megatron_lm_gpt_pretraining.py"),
    Run(f"by_feature/megatron_lm_gpt_pretraining.py {LARGE}", STAND_INS, keeps_promise=False),
    Run(
        "by_feature/megatron_lm_gpt_pretraining.py --model_name_or_path {here}/made --dataset_name {here}/articles "
        "--gradient_accumulation_steps 2 --num_train_epochs 1",
        "^epoch 1: perplexity",
        keeps_promise=False,
    ),
    Run(
        "by_feature/megatron_lm_gpt_pretraining.py --config_name {here}/gpt2 --data {here}/reviews.csv --length 8 "
        "--epochs 1 --batch_size 2",
        "^epoch 1: perplexity",
        keeps_promise=False,
    ),
]
MESHES = [
    Run("torch_native_parallelism/nd_parallel.py", "One process|sharded parameters: 0 1"),
    Run("torch_native_parallelism/nd_parallel_trainer.py"),
    Run("alst_ulysses_sequence_parallelism/sp_alst.py", r"a rank's batches \(8, (64|32)\)"),
]
MESHES_OF_TWO = [
    Run("torch_native_parallelism/nd_parallel.py --tp_size 2", "tensor parallel, sharded layers: 0 1"),
    Run("torch_native_parallelism/nd_parallel.py --cp_size 2", r"context parallel, sharded sequences \(ring\): 0 1"),
    Run("torch_native_parallelism/nd_parallel_trainer.py --tp-size 2 --sequence-length=48"),
]
FP8 = [
    Run("torch_native_parallelism/fsdp2_fp8.py", "13 layers in FP8, emulated"),
    Run(
        "torch_native_parallelism/fsdp2_fp8.py --sequence-length 64 --num-steps 10 --log_with local --precision bf16",
        "0 layers in FP8(.*\n)*epoch 1: loss",
        keeps_promise=False,
    ),
]
DEEPSPEED = [
    Run("by_feature/deepspeed_with_config_support.py", "ZeRO stage 2"),
    Run("by_feature/deepspeed_with_config_support.py --config {here}/zero_stage3_config.json", "ZeRO stage 3"),
    Run(f"by_feature/deepspeed_with_config_support.py {LARGE}", STAND_INS, keeps_promise=False),
    Run(
        "by_feature/deepspeed_with_config_support.py --model_name_or_path {here}/made --dataset_name {here}/articles "
        "--num_train_epochs 1 --gradient_accumulation_steps 2",
        "ZeRO stage 2\nepoch 1: perplexity",
        keeps_promise=False,
    ),
]
GROUPS = {
    "images": IMAGES,
    "more_images": MORE_IMAGES,
    "still_more_images": STILL_MORE_IMAGES,
    "language": LANGUAGE,
    "language_models": LANGUAGE_MODELS,
    "meshes": MESHES,
}
SHORT = {("more_images", 1), ("still_more_images", 1), ("meshes", 1)}
NEED_TRANSFORMERS = {"images", "language", "language_models", "meshes"}
WITHOUT_PROCESSES = {"multigpu_remote_launcher", "by_feature/language_modeling"}
"""A program that is tested with the templates, and what two programs import."""


def write_mrpc(folder: Path, *names: str) -> None:
    """Pairs of sentences in the layout of MRPC: a quotation mark without a partner, and a mark of the byte order."""
    folder.mkdir()
    pairs = [('"the plot was thin', "the plot was thin"), ("the cast was fine", '"the cast was bad')] * 40
    rows = [f"{1 - number % 2}\t{number}\t{number}\t{first}\t{second}" for number, (first, second) in enumerate(pairs)]
    for name in names:
        table = "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows])
        (folder / name).write_text(table, encoding="utf-8-sig")


def write_inputs(folder: Path) -> None:
    """What stands for a user's own data and models: a table of sentences, images, a BERT and a GPT-2."""
    import numpy as np
    from PIL import Image
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import (
        BertConfig,
        BertModel,
        BlipConfig,
        BlipForConditionalGeneration,
        BlipImageProcessor,
        BlipProcessor,
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
        VitsConfig,
        VitsModel,
        VitsTokenizer,
    )

    sentences = ["the plot", "the cast", "the music", "music plot"] * 5
    rows = [f'"{text}",{number % 2}' for number, text in enumerate(sentences)]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *rows]))
    write_mrpc(folder / "published", "msr_paraphrase_train.txt", "msr_paraphrase_test.txt")
    write_mrpc(folder / "glue", "train.tsv", "dev.tsv")
    (folder / "articles").mkdir()
    for split in ("train", "valid"):
        (folder / "articles" / f"wiki.{split}.tokens").write_text(
            " = A film = \n\n the plot the cast the music \n" * 40
        )
    (folder / "pictures").mkdir()
    for number in range(40):
        color = (200, 60, 40) if number % 2 else (40, 60, 200)
        Image.new("RGB", (40 + number, 30), color).save(
            folder / "pictures" / f"{('beagle', 'great_dane')[number % 2]}_{number}.png"
        )
    draw = np.random.default_rng(0)
    np.savez(folder / "images.npz", images=draw.random((40, 3, 12, 10)), labels=draw.integers(0, 4, 40))
    words = ["[PAD]", "[UNK]", "the", "plot", "cast", "music"]
    plain = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", eos_token="[PAD]"
    )
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    BertModel(BertConfig(vocab_size=8, **sizes)).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    GPT2LMHeadModel(
        GPT2Config(vocab_size=8, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    ends = {"bos_token_id": 2, "sep_token_id": 0, "pad_token_id": 0, "eos_token_id": 0}
    config = BlipConfig(
        text_config={"vocab_size": 8, "max_position_embeddings": 32, "encoder_hidden_size": 16, **ends, **sizes},
        vision_config={"image_size": 32, "patch_size": 16, **sizes},
    )
    BlipForConditionalGeneration(config).save_pretrained(folder / "blip")
    BlipProcessor(BlipImageProcessor(size={"height": 32, "width": 32}), tokenizer).save_pretrained(folder / "blip")
    layers: dict[str, Any] = {
        "hidden_size": 16,
        "flow_size": 16,
        "ffn_dim": 16,
        "spectrogram_bins": 9,
        "upsample_initial_channel": 16,
    }
    layers |= {"num_hidden_layers": 1, "num_attention_heads": 2, "prior_encoder_num_flows": 1}
    VitsModel(VitsConfig(vocab_size=8, **layers)).save_pretrained(folder / "vits")
    (folder / "vocab.json").write_text('{"_": 0, "a": 1, "b": 2, " ": 3, "<unk>": 4}')
    VitsTokenizer(str(folder / "vocab.json"), pad_token="_", phonemize=False).save_pretrained(folder / "vits")
    (folder / "texts.txt").write_text("a\nb a\na b\n")


@pytest.mark.launch
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("group", "processes"),
    [pytest.param(*one, marks=() if one in SHORT else pytest.mark.thorough) for one in product(GROUPS, (1, 2))],
)
def test_examples_reach_what_they_promise(group: str, processes: int, tmp_path: Path) -> None:
    if group in NEED_TRANSFORMERS and not os.environ.get("LIBRARIES_REQUIRED"):
        pytest.importorskip("transformers")
    if group in ("images", "language", "language_models"):
        write_inputs(tmp_path)
    runs = [*GROUPS[group], *(MESHES_OF_TWO if group == "meshes" and processes == 2 else ())]
    outputs = launch(runs, processes, tmp_path)
    for run, printed in zip(runs, outputs, strict=True):
        check(run, printed)
    printed_by = {run.words: printed.strip().splitlines() for run, printed in zip(runs, outputs, strict=True)}
    if group == "images":  # interrupted runs end as uninterrupted ones
        ends = {lines[-1] for words, lines in printed_by.items() if words.startswith("by_feature/checkpointing")}
        assert len(ends) == 1
    if group == "meshes" and processes == 2:  # every combination takes the same steps
        losses = {lines[-1] for words, lines in printed_by.items() if "nd_parallel.py" in words}
        assert len(losses) == 1


@pytest.mark.launch
@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 2])
def test_deepspeed_reaches_what_it_promises(processes: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (file,) = read_examples()["deepspeed_config_templates"].path.glob("zero_stage3_config.json")
    (tmp_path / file.name).write_bytes(file.read_bytes())
    write_inputs(tmp_path)
    for run, printed in zip(DEEPSPEED, launch(DEEPSPEED, processes, tmp_path), strict=True):
        check(run, printed)


@pytest.mark.launch
@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 2])
def test_8_bit_floats_reach_what_they_promise(processes: int, tmp_path: Path) -> None:
    if not os.environ.get("LIBRARIES_REQUIRED"):
        pytest.importorskip("torchao")
    for run, printed in zip(FP8, launch(FP8, processes, tmp_path), strict=True):
        check(run, printed)


def test_every_example_is_run() -> None:
    run = {one.words.split()[0] for group in [*GROUPS.values(), DEEPSPEED, FP8] for one in group}
    programs = {f"{name}.py" for name, example in read_examples().items() if example.path.is_file()}
    assert programs - {f"{name}.py" for name in WITHOUT_PROCESSES} <= run
