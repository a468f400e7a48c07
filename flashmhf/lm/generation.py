"""Text from a trained model."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel, set_seed


def generate(
    model: PreTrainedModel,
    text,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int | None = None,
    streamer=None,
) -> str:
    """The continuation of ``prompt`` (without it), with the key-value cache; temperature 0 takes the likeliest token.

    An empty prompt starts after an end-of-text token. Raises ValueError for settings out of range and a prompt without room.
    """
    if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 1:
        raise ValueError(
            f"temperature is {temperature}, top_p {top_p}, max_new_tokens {max_new_tokens}; "
            "they must be at least 0, above 0 and at most 1, and at least 1"
        )
    ids = text(prompt, add_special_tokens=False)["input_ids"] or [text.eos_token_id]
    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        raise ValueError(f"the prompt has {len(ids)} tokens; the model has {model.config.max_position_embeddings} positions")
    if seed is not None:
        set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    settings = GenerationConfig(
        max_new_tokens=min(max_new_tokens, room), eos_token_id=text.eos_token_id, pad_token_id=text.eos_token_id, **sampling
    )
    inputs = torch.tensor([ids], device=model.device)
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings, streamer=streamer)
    return text.decode(out[0, len(ids) :], skip_special_tokens=True)
