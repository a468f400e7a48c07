"""Text from a trained model."""

from __future__ import annotations

import math

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, TextStreamer, set_seed

from flashmhf_recipes.documents import is_unicode
from flashmhf_recipes.errors import OptionError
from flashmhf_recipes.evaluation import positions

from .decoding import RefuseNotFinite
from .modeling import FlashMHFForCausalLM

LOWEST_TEMPERATURE = 1e-6  # scores over much lower ones are infinite


def printer(tokenizer) -> TextStreamer:
    """A ``streamer`` of :func:`generate` that prints the continuation word by word, and a line's end after it."""
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def generate(
    model: PreTrainedModel,
    tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int | None = None,
    streamer: TextStreamer | None = None,
) -> str:
    """The continuation of ``prompt`` (without it), with the key-value cache; temperature 0 takes the likeliest token.

    A model of this package on a GPU decodes with a static cache by CUDA graphs (flashmhf.models.decoding).

    An empty prompt starts after an end-of-text token. ``streamer`` gets the tokens as they come (:func:`printer`). Raises ValueError for
    settings out of range, a prompt without room or that is not Unicode, and a model whose probabilities are not finite.
    """
    if not (temperature == 0 or LOWEST_TEMPERATURE <= temperature < math.inf):
        supported = f"0, and finite numbers from {LOWEST_TEMPERATURE} on"
        raise OptionError("{temperature} is {value}; supported: {supported}", value=temperature, supported=supported)
    if not 0 < top_p <= 1:
        raise OptionError("{top_p} is {value}; it must be above 0 and at most 1", value=top_p)
    if max_new_tokens < 1:
        raise OptionError("{max_new_tokens} is {value}; it must be at least 1", value=max_new_tokens)
    if not is_unicode(prompt):
        raise OptionError("the prompt is not UTF-8")
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    limit = positions(model)
    room = max_new_tokens if limit is None else limit - len(ids)
    if room < 1:
        raise OptionError("the prompt has {tokens} tokens; the model has {limit} positions", tokens=len(ids), limit=limit)
    if seed is not None:
        set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    settings = GenerationConfig(
        max_new_tokens=min(max_new_tokens, room), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id, **sampling
    )
    if model.device.type == "cuda" and isinstance(model, FlashMHFForCausalLM):
        settings.cache_implementation = "static"
    inputs = torch.tensor([ids], device=model.device)
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        generation_config=settings,
        streamer=streamer,
        logits_processor=LogitsProcessorList([RefuseNotFinite()]),
    )
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
