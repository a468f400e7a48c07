"""Token by token with a static cache: one step is a CUDA graph, so the host queues one launch a token.

``model.generate(..., cache_implementation="static")`` of a :class:`flashmhf.models.FlashMHFForCausalLM` comes here.
transformers' own loop queues every kernel of every token from Python, or compiles the model first; with a
``compile_config`` it still does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LlamaModel,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .. import torch_private
from ..graphs import capturing

# its name before transformers 5.24
_CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
WARM_UP = 2  # tokens decoded before the capture: libraries allocate their workspaces in them
_NOT_FINITE = -1  # in place of a token: the logits were NaN or infinite
# Functions of the scores alone, without a look at them from the host.
_CAPTURED = (MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
# for each token, of the model itself, by transformers' loop
_CALLED = ("forward", "prepare_inputs_for_generation", "__call__")
# its hooks stay after output_hidden_states=True, and do nothing without it
_COLLECTORS = "transformers.utils.output_capturing"
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate")


class RefuseNotFinite(LogitsProcessor):
    """Raise ValueError for scores that are not finite.

    Without it the likeliest token of NaN is a token like any other, and drawing one ends in an assertion on the device.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not scores.isfinite().all():
            raise _not_finite()
        return scores


def _not_finite() -> ValueError:
    return ValueError("the model's logits are not finite: its weights are damaged, or its dtype has too small a range")


def takes(
    model: PreTrainedModel,
    own: type[PreTrainedModel],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    synced: bool,
    settings: dict,
) -> bool:
    """Return whether :func:`decode` does what these arguments of ``generate`` ask for, and calls all that ``generate``
    would call.
    """
    cache = settings.get(_CACHE)
    return (
        isinstance(cache, StaticCache)
        and not any(layer.is_initialized or layer.is_sliding for layer in cache.layers)
        and not cache.offloading
        and all(type(processor) in (*_CAPTURED, RefuseNotFinite) for processor in processors)
        and all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)
        and criteria.max_length is not None
        and not any(getattr(config, name) for name in _OUTPUTS)
        and config.prefill_chunk_size is None
        and config.compile_config is None
        and settings.get("inputs_embeds") is None
        and model.config._attn_implementation in ("sdpa", "eager")
        and not varies(model)
        and not getattr(model, "hf_device_map", None)
        and not synced
        and not _has_guests(model, own)
    )


def varies(model: PreTrainedModel) -> bool:
    """Return whether the host chooses the rotary frequencies by the positions, so that no captured step serves all
    tokens.
    """
    return model.model.rotary_emb.rope_type in ("dynamic", "longrope")


def _has_guests(model: PreTrainedModel, own: type[PreTrainedModel]) -> bool:
    """Return whether someone else's code runs within a forward pass: a step that is captured would not call it again.

    Such code is a hook, also a global one, a dispatch mode, and a method in place of that of ``own`` (a subclass's, or
    one that PEFT assigns for its prompts).
    """
    return (
        any(getattr(type(model), name) is not getattr(own, name) or name in vars(model) for name in _CALLED)
        or torch_private.is_observed()
        or torch_private.has_global_hooks()
        or any("forward" in vars(part) or part._forward_pre_hooks for part in model.modules())
        or any(
            getattr(hook, "__module__", "") != _COLLECTORS
            for part in model.modules()
            for hook in part._forward_hooks.values()
        )
    )


class _Step:
    """Hold buffers of fixed addresses, and do the work of one token on them.

    ``report`` [2, B] holds the next tokens, and 1 where a sequence ended. ``mask`` [B, 1, 1, cache length] is added to
    the attention's scores. ``slot`` [1] is the cache's next free place.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: StaticCache,
        prompt: tuple[Tensor, Tensor | None, Tensor],
        choose: Callable[[Tensor], Tensor],
        end: Tensor,
        padding: int,
    ) -> None:
        """Take the prompt through the model; ``report`` is its continuation. ``prompt`` has tokens [B, L], a mask of
        those that are not padding, and positions [B or 1, L]."""
        self.model, self.cache, self.choose, self.end, self.padding = model, cache, choose, end, padding
        ids, attention_mask, positions = prompt
        (batch, length), device, dtype = ids.shape, ids.device, model.dtype
        seen = torch.ones_like(ids) if attention_mask is None else attention_mask
        self.mask = torch.full(
            (batch, 1, 1, cache.layers[0].max_cache_len), torch.finfo(dtype).min, dtype=dtype, device=device
        )
        self.mask[:, 0, 0, :length].masked_fill_(seen.bool(), 0)
        self.slot = torch.full((1,), length, device=device)
        self.position = positions[:, -1:].expand(batch, 1) + 1
        self.token = torch.zeros_like(self.position)
        self.report = torch.zeros(2, batch, dtype=torch.long, device=device)
        self._choose(self._hidden(ids, attention_mask, positions))

    def run(self) -> None:
        self.mask.index_fill_(3, self.slot, 0)
        self._choose(self._hidden(self.token, self.mask, self.position))
        self.slot += 1
        self.position += 1

    def _hidden(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        out = self.model.model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{_CACHE: self.cache})
        return out.last_hidden_state[:, -1]

    def _choose(self, hidden: Tensor) -> None:
        logits = self.model.lm_head(hidden).float()
        chosen = torch.where(logits.isfinite().all(-1), self.choose(logits), _NOT_FINITE)
        tokens, ended = self.report
        tokens.copy_(torch.where(ended.bool(), self.padding, chosen))
        ended.logical_or_(torch.isin(tokens, self.end))
        self.token.copy_(tokens.clamp(min=0)[:, None])


def _drawn(scores: Tensor) -> Tensor:
    """Draw from softmax(scores): argmax of p / Exp(1). torch.multinomial looks at its input from the host."""
    return (scores.softmax(-1) / torch.empty_like(scores).exponential_()).argmax(-1)


class _Reports:
    """The reports of a step on the host, read one step late: the device has a step to work on while the host reads."""

    def __init__(self, step: _Step) -> None:
        self.report = step.report
        self.host = [torch.empty(step.report.shape, dtype=torch.long, pin_memory=step.report.is_cuda) for _ in range(2)]
        self.copied = [torch.cuda.Event() if step.report.is_cuda else None for _ in range(2)]
        self.queued = self.read = 0

    def queue(self) -> None:
        place = self.queued % 2
        self.host[place].copy_(self.report, non_blocking=True)
        if self.copied[place] is not None:
            self.copied[place].record()
        self.queued += 1

    def next(self) -> tuple[Tensor, bool]:
        """Return (tokens [B], whether every sequence has ended) of the oldest step.

        Raises ValueError if logits were not finite.
        """
        place = self.read % 2
        self.read += 1
        if self.copied[place] is not None:
            self.copied[place].synchronize()
        tokens, ended = self.host[place].clone()
        if (tokens == _NOT_FINITE).any():
            raise _not_finite()
        return tokens, bool(ended.all())


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer,
    settings: dict,
) -> Tensor:
    """Return ``generate``'s result [B, L + new tokens] for arguments that :func:`takes` accepts.

    Raises ValueError if the model's logits are not finite or the cache is too short.
    """
    warpers = [processor for processor in processors if not isinstance(processor, RefuseNotFinite)]
    pick = _drawn if config.do_sample else partial(torch.argmax, dim=-1)

    def choose(scores: Tensor) -> Tensor:
        for warper in warpers:
            scores = warper(None, scores)
        return pick(scores)

    ends = [
        criterion.eos_token_id.to(input_ids.device) for criterion in criteria if isinstance(criterion, EosTokenCriteria)
    ]
    end = torch.cat(ends) if ends else input_ids.new_empty(0)
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    count = criteria.max_length - input_ids.shape[1]
    cache, places = settings[_CACHE], criteria.max_length - 1  # the last token is not an input
    if cache.layers[0].max_cache_len < places:  # a GPU would end with an assertion, which leaves its context unusable
        raise ValueError(
            f"{_CACHE} has {cache.layers[0].max_cache_len} places; {criteria.max_length} tokens need {places}"
        )
    step = _Step(
        model, cache, (input_ids, settings.get("attention_mask"), settings["position_ids"]), choose, end, padding
    )
    reports, tokens, run = _Reports(step), [], step.run
    reports.queue()
    for number in range(1, count + 1):
        if number < count:
            if number == WARM_UP + 1 and input_ids.is_cuda:
                graph = torch.cuda.CUDAGraph()
                with capturing(graph):  # which runs nothing
                    step.run()
                run = graph.replay
            run()
            reports.queue()
        chosen, ended = reports.next()
        tokens.append(chosen)
        if streamer is not None:
            streamer.put(chosen)
        if ended:
            break
    # the step after the end is queued: a caller who goes on with the cache must not find its token there
    if number < count:
        for layer in cache.layers:
            layer.cumulative_length.sub_(1)
    if streamer is not None:
        streamer.end()
    return torch.cat([input_ids, torch.stack(tokens, 1).to(input_ids.device)], 1)
