"""Text generation with a model in shards: every token is a forward pass through the pipeline, over the whole sequence.

Legend: B = prompts, P = columns of the prompts with padding, S = tokens so far, V = tokens of the vocabulary, K = beams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

NextLogits = Callable[[Tensor, Tensor], Tensor]
"""From tokens (B, S), padded on the right, and the length of each row, int64 (B,), to logits of the next tokens, (B, V)."""
DEFAULT_NEW_TOKENS = 20


@dataclass(frozen=True)
class GenerationOptions:
    """How a text is continued.

    Args:
        max_length: Columns of the result, prompts included; without effect where `max_new_tokens` is set.
        max_new_tokens: Tokens after each prompt; 20 unless either is set.
        num_beams: Sequences that beam search follows; 1 for none.
        do_sample: Whether tokens are drawn; None for: if `temperature`, `top_k` or `top_p` is set.
        temperature: By which logits are divided before a token is drawn, above 0.
        top_k: Draw from this many most probable tokens; 0 for all.
        top_p: Draw from the most probable tokens that have this probability together, 0..1; 0 for all.
        top_p_decay: By which `top_p` is multiplied after each token, 0..1; 0 for no decay.
        top_p_bound: Below which it does not fall, 0..1.
        length_penalty: Beams are compared by log probability / new tokens ** length_penalty.
        add_BOS: Whether prompts are put after the token `bos_token_id`.
        bos_token_id, eos_token_id, pad_token_id: Tokens; those of the model's generation_config unless set.
        random_seed: Of the drawn tokens; drawn from torch's random numbers unless set.
    """

    max_length: int | None = None
    max_new_tokens: int | None = None
    num_beams: int = 1
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    length_penalty: float = 1.0
    add_BOS: bool = False  # noqa: N815 - Megatron-LM's name
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    random_seed: int | None = None

    @classmethod
    def of(cls, settings: dict[str, Any], defaults: Any) -> GenerationOptions:
        """Options from the arguments of a call.

        Args:
            settings: Arguments by name; None stands for the default, for `eos_token_id` for texts without an end.
            defaults: Has the special tokens where `settings` does not, such as a generation_config.

        Raises:
            TypeError: There is no such option.
            ValueError: A value is out of range, or two options cannot be combined.
        """
        names = [field.name for field in fields(cls)]
        endless = "eos_token_id" in settings and settings["eos_token_id"] is None
        settings = {name: _number(value) for name, value in settings.items() if value is not None}
        if unknown := sorted(set(settings) - set(names)):
            raise TypeError(
                f"generate() got {', '.join(map(repr, unknown))}, which Megatron-LM's generation does not have. Pass "
                f"input_ids, attention_mask, {', '.join(names)}."
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            settings.setdefault(name, getattr(defaults, name, None))
        if endless:
            settings["eos_token_id"] = None
        options = cls(**settings)
        options._check_ranges()
        options._check_combinations()
        return options

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        if self.do_sample is not None:
            return self.do_sample
        return any(value is not None for value in (self.temperature, self.top_k, self.top_p))

    @property
    def ends(self) -> list[int]:
        """The tokens after which a text is over."""
        ends = self.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]

    @property
    def padding(self) -> int:
        """What stands where a row has no token."""
        return self.pad_token_id if self.pad_token_id is not None else (self.ends or [0])[0]

    def num_new(self, columns: int) -> int:
        """How many tokens follow prompts of some columns."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is None:
            return DEFAULT_NEW_TOKENS
        if self.max_length <= columns:
            raise ValueError(
                f"max_length={self.max_length}, but the prompts have {columns} tokens already. Set it higher, or set "
                "max_new_tokens."
            )
        return self.max_length - columns

    def _check_ranges(self) -> None:
        for name, fits, range_ in (
            ("max_length", lambda value: value >= 1, "at least 1"),
            ("max_new_tokens", lambda value: value >= 1, "at least 1"),
            ("num_beams", lambda value: value >= 1, "at least 1"),
            ("temperature", lambda value: value > 0, "above 0"),
            ("top_k", lambda value: value >= 0, "at least 0"),
            ("top_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
            ("top_p_decay", lambda value: 0 <= value <= 1, "from 0 to 1"),
            ("top_p_bound", lambda value: 0 <= value <= 1, "from 0 to 1"),
        ):
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise ValueError(f"{name}={value!r}, but it must be {range_}.")

    def _check_combinations(self) -> None:
        if self.top_k == 0 and self.top_p == 0:
            raise ValueError(
                f"top_k=0 and top_p={self.top_p!r} together choose nothing. Set one of them, or leave both out for greedy "
                "decoding."
            )
        if self.num_beams > 1 and self.samples:
            raise ValueError(
                f"num_beams={self.num_beams} cannot be combined with drawn tokens. Leave out do_sample, temperature, top_k and "
                "top_p, or num_beams."
            )
        if self.add_BOS and self.bos_token_id is None:
            raise ValueError("add_BOS=True, but the model's configuration has bos_token_id=None. Pass bos_token_id.")


def _number(value: Any) -> Any:
    """A plain number from a tensor of one element, which Megatron-LM's programs pass."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


@dataclass(frozen=True)
class Prompts:
    """Prompts without their padding.

    Args:
        rows: Their tokens, int64, one tensor for each.
        starts: The columns of padding before each.
        columns: Columns with padding (P).
    """

    rows: list[Tensor]
    starts: list[int]
    columns: int

    @classmethod
    def of(cls, tokens: Any, mask: Any, first_token: int | None) -> Prompts:
        """Prompts from a batch.

        Args:
            tokens: int64 (B, P).
            mask: As `tokens`, 0 where there is padding, on either side; None for no padding.
            first_token: Put before each prompt; None for none.

        Raises:
            ValueError: The shapes do not fit, a prompt is empty, or padding is in the midst of it.
        """
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not tokens.numel():
            shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"The prompts are {shape}. Pass input_ids as a tensor of shape (prompts, tokens).")
        mask = torch.ones_like(tokens) if mask is None else mask
        if mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask has the shape {tuple(mask.shape)}, and input_ids has {tuple(tokens.shape)}. Pass one entry "
                "per token."
            )
        rows, starts = [], []
        for number, (row, real) in enumerate(zip(tokens, mask.bool(), strict=True)):
            places = real.nonzero().flatten()
            if not len(places) or int(places[-1] - places[0]) + 1 != len(places):
                raise ValueError(
                    f"attention_mask of prompt {number} is {real.long().tolist()}. Pass at least one token per prompt, and pad on "
                    "the left or on the right of it."
                )
            prompt = row[real]
            rows.append(prompt if first_token is None else F.pad(prompt, (1, 0), value=first_token))
            starts.append(int(places[0]))
        return cls(rows, starts, tokens.shape[1] + (first_token is not None))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.rows))

    def continued(self, texts: Iterable[Tensor], padding: int) -> Tensor:
        """Prompts with their continuations, (B, P + new tokens).

        Args:
            texts: Each prompt with the tokens after it.
            padding: What stands where there is no token.
        """
        texts = list(texts)
        width = self.columns + max(len(text) - len(row) for text, row in zip(texts, self.rows, strict=True))
        whole = texts[0].new_full((len(texts), width), padding)
        for line, text, start in zip(whole, texts, self.starts, strict=True):
            line[start : start + len(text)] = text
        return whole


def generate(next_logits: NextLogits, prompts: Prompts, options: GenerationOptions, seed: int) -> Tensor:
    """Continue prompts.

    Args:
        next_logits: Computes the logits of next tokens; all ranks of a replica call it together.
        prompts: The prompts.
        options: How to.
        seed: Of the drawn tokens; with the same one, all ranks draw the same.

    Returns:
        int64 (B, P + new tokens): after the end of a text, `options.padding`.
    """
    num_new = options.num_new(prompts.columns)
    if options.num_beams > 1:
        texts = [search_beams(next_logits, row, options, num_new) for row in prompts.rows]
    else:
        texts = _decode(next_logits, prompts.rows, options, num_new, seed)
    return prompts.continued(texts, options.padding)


def _decode(
    next_logits: NextLogits, rows: list[Tensor], options: GenerationOptions, num_new: int, seed: int
) -> list[Tensor]:
    """Texts that go on with the most probable token each time, or with one that is drawn."""
    tokens = F.pad(pad_sequence(rows, batch_first=True, padding_value=options.padding), (0, num_new))
    lengths = torch.tensor([len(row) for row in rows], device=tokens.device)
    every, ends = torch.arange(len(rows), device=tokens.device), tokens.new_tensor(options.ends)
    running = torch.ones(len(rows), dtype=torch.bool, device=tokens.device)
    generator = torch.Generator(tokens.device).manual_seed(seed)
    top_p = options.top_p or 0.0
    for _ in range(num_new):
        logits = next_logits(tokens[:, : int(lengths.max())], lengths)
        following = draw(logits, options, top_p, generator) if options.samples else logits.argmax(-1)
        tokens[every, lengths] = following.where(running, options.padding)
        lengths = lengths + 1
        running = running & ~torch.isin(following, ends)
        if not running.any():
            break
        if options.top_p_decay:
            top_p = max(top_p * options.top_p_decay, options.top_p_bound)
    return [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]


def draw(logits: Tensor, options: GenerationOptions, top_p: float, generator: torch.Generator) -> Tensor:
    """Draw a token for each row, int64 (B,).

    Args:
        logits: float32 (B, V).
        options: The temperature and `top_k`.
        top_p: The probability that the tokens drawn from have together; 0 for all.
        generator: Where random numbers come from.
    """
    ordered, tokens = (logits / (options.temperature or 1.0)).sort(dim=-1, descending=True)
    if options.top_k:
        ordered[:, options.top_k :] = -torch.inf
    probabilities = ordered.softmax(-1)
    if top_p:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return tokens.gather(1, torch.multinomial(probabilities, 1, generator=generator)).flatten()


def search_beams(next_logits: NextLogits, prompt: Tensor, options: GenerationOptions, num_new: int) -> Tensor:
    """The most probable continuation of one prompt that beam search meets.

    Args:
        next_logits: Computes the logits of next tokens.
        prompt: int64 (S,).
        options: The number of beams (K), and how lengths count.
        num_new: New tokens at most.
    """
    beams, ends = options.num_beams, prompt.new_tensor(options.ends)
    tokens, scores = prompt.expand(beams, -1), torch.full((beams,), -torch.inf, device=prompt.device)
    scores[0] = 0.0  # all beams are the same at first, so a single one counts
    complete: list[tuple[float, Tensor]] = []
    for count in range(1, num_new + 1):
        logits = next_logits(tokens, torch.full((beams,), tokens.shape[1], device=tokens.device))
        totals = scores[:, None] + logits.log_softmax(-1)
        best, places = totals.flatten().topk(min(beams * (1 + len(ends)), totals.numel()))
        texts = torch.cat([tokens[places // logits.shape[1]], (places % logits.shape[1])[:, None]], dim=1)
        over, norm = torch.isin(texts[:, -1], ends), count**options.length_penalty
        complete += [(float(best[at]) / norm, texts[at]) for at in over[:beams].nonzero().flatten().tolist()]
        complete = sorted(complete, key=lambda pair: -pair[0])[:beams]
        tokens, scores = texts[~over][:beams], best[~over][:beams]
        if len(complete) == beams and complete[-1][0] >= float(scores[0]) / norm:
            break
    else:
        complete += [(float(score) / norm, text) for score, text in zip(scores, tokens, strict=True)]
    return max(complete, key=lambda pair: pair[0])[1]
