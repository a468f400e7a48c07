"""Generation with a static cache against transformers' own loop."""

from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    TemperatureLogitsWarper,
)

from flashmhf.models import FFN_TYPES, FlashMHFForCausalLM, decoding
from flashmhf.models.presets import preset

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(ffn: str = "flashmhf", **overrides):
    """Random weights of such a size that the likeliest token changes from step to step."""
    model = AutoModelForCausalLM.from_config(
        preset(f"{ffn}-tiny").config(tie_word_embeddings=False, **overrides)
    ).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def prompt(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(2, 512, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """The numbers of prompts that :func:`decoding.decode` got."""
    calls, decode = [], decoding.decode
    monkeypatch.setattr(
        decoding, "decode", lambda model, ids, *args: calls.append(len(ids)) or decode(model, ids, *args)
    )
    return calls


@pytest.mark.parametrize("ffn", FFN_TYPES)
def test_greedy_equals_transformers(ffn, device, decoded):
    model, ids = tiny(ffn).to(device), prompt(6).to(device)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    expected = model.generate(ids, **settings)
    assert not decoded
    assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected)
    assert decoded == [6]
    assert len(expected[:, 9:].unique()) > 12


FURTHER_APART = 2 * torch.arange(9)
GIVEN = {  # what a caller of three prompts gives, for a mask of the second's padding
    "left padding": lambda mask: {"attention_mask": mask.flip(1)},
    "right padding": lambda mask: {"attention_mask": mask},
    "float mask": lambda mask: {"attention_mask": mask.flip(1).float()},
    "positions": lambda mask: {"position_ids": FURTHER_APART.to(mask.device).expand(3, -1)},
    "one row of positions": lambda mask: {"position_ids": FURTHER_APART.to(mask.device)[None]},
}


@pytest.mark.parametrize("given", GIVEN)
def test_masks_positions_and_ends_of_text(given, device, decoded):
    """transformers' positions of a padded prompt, and those that a caller gives; every prompt has its own end."""
    model, ids = tiny().to(device), prompt(3).to(device)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    settings = GIVEN[given](mask) | {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 1}
    free = model.generate(ids, eos_token_id=None, **settings)
    ends = [int(free[row, 9 + step]) for row, step in enumerate((5, 11, 3))]
    for eos, longest in ((None, 39), (ends, 38)):
        expected = model.generate(ids, eos_token_id=eos, **settings)
        assert expected.shape[1] <= longest
        assert torch.equal(model.generate(ids, eos_token_id=eos, cache_implementation="static", **settings), expected)
    assert decoded == [3, 3]


def test_a_cache_that_is_too_short():
    model, ids = tiny(), prompt()
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    with pytest.raises(ValueError, match=" has 17 places; 19 tokens need 18"):
        model.generate(ids, past_key_values=StaticCache(config=model.config, max_cache_len=17), **settings)
    cache = StaticCache(config=model.config, max_cache_len=18)
    assert torch.equal(model.generate(ids, past_key_values=cache, **settings), model.generate(ids, **settings))


def test_a_cache_that_its_owner_goes_on_with(device, decoded):
    """After an early end it holds the tokens before the last one, as transformers leaves it."""
    model, ids = tiny().to(device), prompt(1).to(device)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 1, "disable_compile": True}
    end = int(model.generate(ids, eos_token_id=None, **settings)[0, 9 + 4])
    cache = StaticCache(config=model.config, max_cache_len=40)
    said = torch.cat(
        [model.generate(ids, past_key_values=cache, eos_token_id=end, **settings), prompt(1, 3).to(device)], 1
    )
    assert decoded == [1] and said.shape[1] == 9 + 5 + 3
    assert torch.equal(model.generate(said, past_key_values=cache, **settings), model.generate(said, **settings))


def test_one_token_and_a_streamer(decoded):
    model, ids = tiny(), prompt(1)
    for count in (1, 2, 7):
        streamer, settings = mock.Mock(), {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        out = model.generate(ids, cache_implementation="static", streamer=streamer, **settings)
        streamed = [token for call in streamer.put.call_args_list for token in call.args[0].flatten().tolist()]
        streamer.end.assert_called_once_with()
        assert streamed == out[0].tolist() and out.shape[1] == 9 + count
    assert decoded == [1, 1, 1]


def test_samples_follow_the_probabilities(device, decoded):
    """300 draws of the first token after one prompt, and the same draws with the same seed."""
    model, ids = tiny().to(device), prompt(1).expand(300, -1).to(device)
    settings = {"max_new_tokens": 5, "do_sample": True, "top_k": 3, "temperature": 2.0, "eos_token_id": None}
    torch.manual_seed(0)
    first = model.generate(ids, cache_implementation="static", **settings)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, cache_implementation="static", **settings), first)
    with torch.no_grad():
        top = (model(ids[:1]).logits[0, -1].float() / 2).topk(3)
    shares = torch.stack([(first[:, 9] == token).float().mean() for token in top.indices])
    assert abs(shares.sum() - 1) < 1e-5
    assert (shares - top.values.softmax(0)).abs().max() < 0.12
    assert len(first[:, 10:].unique()) > 3 and decoded == [300, 300]


class Unrepeated(TemperatureLogitsWarper):
    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, scores.scatter(1, input_ids[:, -1:], -1e9))


def test_what_transformers_loop_keeps(decoded):
    """Arguments that a captured step cannot honour go to transformers."""
    model, ids = tiny(), prompt()
    settings = {
        "max_new_tokens": 4,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
        "eos_token_id": None,
    }
    model.generate(ids, logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)]), **settings)
    model.generate(ids, return_dict_in_generate=True, output_scores=True, **settings)
    model.generate(ids, logits_processor=LogitsProcessorList([Unrepeated(2.0)]), **settings)
    model.generate(ids, max_time=100.0, **settings)
    model.generate(ids, compile_config=CompileConfig(), **settings)
    assert not decoded


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_frequencies_that_follow_the_positions_are_neither_captured_nor_compiled(device, decoded):
    model = tiny(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}, max_position_embeddings=12
    ).to(device)
    settings = {"inputs": prompt().to(device), "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert (
        torch.equal(model.generate(cache_implementation="static", **settings), model.generate(**settings))
        and not decoded
    )


def test_hooks_that_collect_hidden_states_do_not_slow_later_calls(decoded):
    model, ids = tiny(), prompt()
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert len(model(ids, output_hidden_states=True).hidden_states) == len(model.model.layers) + 1
    assert (
        torch.equal(model.generate(ids, cache_implementation="static", **settings), model.generate(ids, **settings))
        and decoded
    )


def ban(module, args, output):
    output.logits[..., 100:] = -1e9


class Negated(FlashMHFForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output


GUESTS = {  # what may stand on a model
    "hook of the model": lambda model: model.register_forward_hook(ban),
    "hook of a layer": lambda model: model.model.layers[0].register_forward_pre_hook(
        lambda module, args: (args[0] * -1, *args[1:])
    ),
    "global hook": lambda model: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: ban(module, args, output) if module is model else None
    ),
    "subclass": lambda model: setattr(model, "__class__", Negated),
    "assigned inputs": lambda model: setattr(
        model,
        "prepare_inputs_for_generation",
        lambda ids, **kwargs: FlashMHFForCausalLM.prepare_inputs_for_generation(model, ids.clamp(max=300), **kwargs),
    ),
}


@pytest.mark.parametrize("guest", GUESTS)
def test_a_static_cache_leaves_nothing_out(guest, decoded):
    """What is hooked, overridden or assigned is called for every token, whatever the cache."""
    model, ids = tiny(), prompt()
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    plain = model.generate(ids, **settings)
    removable = GUESTS[guest](model)
    try:
        expected = model.generate(ids, **settings)
        assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected) and not decoded
        assert not torch.equal(expected, plain)
    finally:
        if hasattr(removable, "remove"):
            removable.remove()


def test_not_finite():
    model = tiny()
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        model.generate(prompt(), max_new_tokens=4, do_sample=True, cache_implementation="static")


def test_norm_of_inference_rounds_no_worse():
    model = tiny()
    norm = model.model.norm
    for dtype in (torch.float32, torch.bfloat16):
        norm.to(dtype)
        x = torch.randn(64, 64).to(dtype)
        exact = (
            x.double()
            * (x.double().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
            * norm.weight.double()
        )
        trained = norm(x)
        with torch.no_grad():
            inferred = norm(x)
        assert (inferred.double() - exact).norm() <= 1.05 * (trained.double() - exact).norm()
        assert inferred.dtype == dtype
