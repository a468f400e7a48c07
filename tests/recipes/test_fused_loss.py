"""The loss without all logits: values of the plain loss, for every Llama, also resumed and held out. On a CPU, liger's
kernels run under Triton's interpreter."""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, run_interpreted, runs_kernels, starts_interpreter
from lm_runs import At, options, start, store_tokens
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import flashmhf
from flashmhf.models import FlashMHFForCausalLM
from flashmhf.models.presets import preset
from flashmhf_recipes import fused_loss, metrics, training
from flashmhf_recipes.errors import OptionError


@starts_interpreter
def test_interpreted():
    pytest.importorskip("liger_kernel")
    run_interpreted(__file__)


def llama(swapped: bool) -> PreTrainedModel:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=300)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    if swapped:
        flashmhf.replace_ffn(model, num_heads=2, backend="eager")
    return model


def ours(name: str, **settings) -> PreTrainedModel:
    return FlashMHFForCausalLM(preset(name).config(vocab_size=300, ffn_backend="eager", **settings))


MODELS = {
    "FlashMHF": lambda: ours("flashmhf-tiny"), "SwiGLU": lambda: ours("swiglu-tiny"),
    "tied": lambda: ours("flashmhf-tiny", tie_word_embeddings=True), "Llama": lambda: llama(False),
    "swapped Llama": lambda: llama(True),
}  # fmt: skip


@runs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_logits(name):
    """Also with a part of the labels left out; the logits are never there."""
    torch.manual_seed(0)
    model = MODELS[name]().to(DEVICE)
    ids = torch.randint(0, 300, (2, 12), device=DEVICE)
    labels = ids.clone().index_fill_(1, torch.arange(5, 8, device=DEVICE), -100)
    found = []
    for _ in range(2):
        for settings in ({}, {"num_items_in_batch": 20}):
            model.zero_grad()
            out = model(input_ids=ids, labels=labels, **settings)
            out.loss.backward()
            found.append((out.loss, [p.grad.clone() for p in model.parameters()], out.logits is None))
        fused_loss.apply(model)
    for plain, fused in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(fused[:2], plain[:2], rtol=1e-4, atol=1e-6)
        assert (plain[2], fused[2]) == (False, True)
    assert model.eval()(input_ids=ids).logits.shape == (2, 12, 300)


@runs_kernels
@pytest.mark.parametrize(("precision", "rel"), [
    ("fp32", 1e-4), pytest.param("bf16", 2e-2, marks=pytest.mark.skipif(INTERPRETED, reason="bf16's product is wrong")),
])  # fmt: skip
def test_a_run_is_the_one_with_the_plain_loss(precision, rel, text, tmp_path):
    """Its losses, held-out loss and weights, to rounding; bf16 is autocast over float32 weights."""
    settings = dict(steps=2, log_every=1, batch=1, length=16, eval_fraction=0.01, eval_every=2, preset="swiglu-tiny")
    settings |= dict(device=DEVICE if INTERPRETED else "auto", precision=precision, vocab_size=300, data=[])
    settings["tokens"] = str(store_tokens(text, tmp_path))
    without_logits = {False: [], True: []}

    def noting(fused: bool) -> At:
        def hook(module, args, out):
            without_logits[fused].append(out.logits is None)

        return At("on_train_begin", None, lambda model, **_: model.register_forward_hook(hook))

    plain, run = (
        start(tmp_path / str(fused), text, [noting(fused)], fused_loss=fused, **settings) for fused in (False, True)
    )
    assert not any(without_logits[False]) and all(without_logits[True]) and all(without_logits.values())
    ours, theirs = (
        [(name, row[name]) for row in metrics.read_rows(result.output) for name in ("loss", "eval_loss") if name in row]
        for result in (run, plain)
    )
    assert [name for name, _ in ours] == [name for name, _ in theirs] == ["loss", "loss", "eval_loss"]
    assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=rel)


@pytest.mark.parametrize(("settings", "message"), [
    ({"device": "cpu"}, "fused_loss is on, whose kernels are Triton's: device is cpu; supported: an NVIDIA GPU"),
    ({"tp": 2}, "fused_loss is on with tp = 2, which shards the head; supported: tp = 1"),
    ({"arguments": {"label_smoothing_factor": 0.1}}, "arguments cannot set label_smoothing_factor with fused_loss"),
    ({"arguments": {"use_liger_kernel": True}}, "arguments cannot set use_liger_kernel; use fused_loss"),
])  # fmt: skip
def test_where_it_is_refused(settings, message, text, tmp_path, monkeypatch):
    """Before anything is written."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fused_loss.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(OptionError, match=message):
        training.start(options(tmp_path / "run", text, fused_loss=True, **settings))
    assert not (tmp_path / "run").exists()


def test_models_and_machines_that_cannot(monkeypatch):
    with pytest.raises(OptionError, match="fused_loss is on for a FlashMHFModel; supported: Llamas, with any network"):
        fused_loss.check(MODELS["FlashMHF"]().model)
    monkeypatch.setattr(fused_loss.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="it needs liger-kernel: pip install liger-kernel"):
        fused_loss.check_machine(torch.device("cpu"))
