"""Text from a trained model."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from numbers import Real

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, TextStreamer

from .. import checks

LOWEST_TEMPERATURE = 1e-6  # scores over much lower ones are infinite

_DECODING = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


class _RefuseNotFinite(LogitsProcessor):
    """Raise ValueError for scores that are not finite, of which a token would be drawn like any other."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not scores.isfinite().all():
            raise ValueError("the model's logits are not finite: its weights are damaged, or its dtype too narrow")
        return scores


class Printer(TextStreamer):
    """Print ``prompt``, when the model begins, and a continuation word by word, then end the line: a ``streamer`` for
    :func:`generate`.

    It is decoded with the end of the prompt, since many tokenizers drop the space before the first word.
    """

    def __init__(self, tokenizer, prompt: str = "") -> None:
        super().__init__(tokenizer, skip_prompt=True, **_DECODING)
        self.prompt = prompt

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:
            print(self.prompt, end="", flush=True)
            self.token_cache = value.flatten().tolist()[-16:]  # all of it would be decoded again for every token
            self.print_len = len(self.tokenizer.decode(self.token_cache, **_DECODING))
        super().put(value)


@contextlib.contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed what sampling on ``device`` draws from, unless ``seed`` is None, and put it back as it was."""
    kind = "cuda" if device.type == "cpu" else device.type
    module = getattr(torch, kind)
    devices = [] if device.type == "cpu" else range(module.device_count())
    with torch.random.fork_rng(devices, enabled=seed is not None, device_type=kind):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if devices:
                getattr(module, "manual_seed_all", module.manual_seed)(seed)
        yield


def generate(
    model: PreTrainedModel, tokenizer, prompt: str, *, max_new_tokens: int = 100, temperature: float = 0.8,
    top_p: float = 0.95, seed: int | None = None, streamer: TextStreamer | None = None,
) -> str:  # fmt: skip
    """Return the continuation of ``prompt``, without it. Temperature 0 takes the likeliest token.

    The model's own settings take no part, and nothing is written to the model. The prompt gets no special tokens, as
    texts in training; an empty one starts after an end-of-text token. ``streamer``, such as a :class:`Printer`, gets
    the tokens as they come. A ``seed`` leaves the process's random states as they were. Raises TypeError for other
    types, ValueError for settings out of range, a prompt that leaves no room, is not Unicode or has nothing to start
    after, and probabilities that are not finite.
    """
    checks.instance("model", model, PreTrainedModel, "a transformers.PreTrainedModel")
    checks.instance("prompt", prompt, str)
    checks.instance("temperature", temperature, Real, "a number")
    checks.instance("top_p", top_p, Real, "a number")
    checks.instance("seed", seed, int | None, "an int or None")
    if not (temperature == 0 or LOWEST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"temperature is {temperature}; supported: 0, and finite numbers from {LOWEST_TEMPERATURE} on")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    checks.positive("max_new_tokens", max_new_tokens)
    if seed is not None and not 0 <= seed < 1 << 32:
        raise ValueError(f"seed is {seed}; supported: integers from 0 to 2^32 - 1")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError("prompt is not Unicode: it holds surrogates") from error
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    if ids == [None]:
        raise ValueError("prompt is empty, and the tokenizer has no end-of-text token to start after; give some tokens")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = max_new_tokens if limit is None else limit - len(ids)
    if room < 1:
        raise ValueError(f"the prompt has {len(ids)} tokens; the model has {limit} positions")
    end = tokenizer.eos_token_id
    settings = GenerationConfig(max_new_tokens=min(max_new_tokens, room), eos_token_id=end, pad_token_id=end)
    if temperature:  # top_k: transformers' own default samples from the 50 likeliest tokens
        settings.update(do_sample=True, temperature=temperature, top_p=top_p, top_k=0)
    # transformers would take what ``settings`` leaves open from the model's own, such as beams. A view shares modules.
    view = copy.copy(model)
    view.generation_config = GenerationConfig()
    inputs = torch.tensor([ids], device=model.device)
    with _seeded(seed, model.device):
        out = view.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=settings, streamer=streamer,
            logits_processor=LogitsProcessorList([_RefuseNotFinite()]),
        )  # fmt: skip
    return tokenizer.decode(out[0], **_DECODING)[len(tokenizer.decode(ids, **_DECODING)) :]
