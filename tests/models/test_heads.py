"""Heads of transformers over the model: sequence and token classification, question answering."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from flashmhf import models as lm
from flashmhf.models.presets import preset
from flashmhf_recipes.flops import training_flops_per_token

pytestmark = pytest.mark.usefixtures("one_thread")

# auto class -> (the model, its labels for two sequences of 7 tokens, the shape of what it scores)
HEADS = {
    "AutoModelForSequenceClassification": (lm.FlashMHFForSequenceClassification, {"labels": torch.tensor([0, 2])}, (2, 3)),
    "AutoModelForTokenClassification": (lm.FlashMHFForTokenClassification, {"labels": torch.randint(3, (2, 7))}, (2, 7, 3)),
    "AutoModelForQuestionAnswering": (
        lm.FlashMHFForQuestionAnswering,
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])},
        (2, 7),
    ),
}


@pytest.mark.parametrize("auto", HEADS)
@pytest.mark.parametrize("ffn", ["flashmhf", "mh_ffn"])
def test_trains_saves_and_loads(auto, ffn, tmp_path):
    kind, labels, shape = HEADS[auto]
    config = preset(f"{ffn}-tiny").config(num_labels=3, pad_token_id=1, ffn_num_kv_heads=1)
    model = getattr(transformers, auto).from_config(config)
    assert type(model) is kind
    ids = torch.randint(2, 500, (2, 7))
    out = model(input_ids=ids, **labels)
    out.loss.backward()
    scored = out.start_logits if "Question" in auto else out.logits
    assert scored.shape == shape
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval().save_pretrained(tmp_path)
    loaded = getattr(transformers, auto).from_pretrained(tmp_path)
    assert type(loaded) is kind
    again = loaded(input_ids=ids)
    expected = model(input_ids=ids)
    for name in ("start_logits", "end_logits") if "Question" in auto else ("logits",):
        assert torch.equal(again[name], expected[name])


def test_a_trained_language_model_gives_a_classifier_its_weights(tmp_path):
    causal = transformers.AutoModelForCausalLM.from_config(preset("flashmhf-tiny").config())
    causal.save_pretrained(tmp_path)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    expected = dict(causal.model.named_parameters())
    for name, parameter in classifier.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_saved_model_names_every_class(tmp_path):
    model = transformers.AutoModelForTokenClassification.from_config(preset("flashmhf-tiny").config(num_labels=3))
    model.save_pretrained(tmp_path)
    source = (tmp_path / "modeling_flashmhf.py").read_text()
    for name in ("FlashMHFForSequenceClassification", "FlashMHFForTokenClassification", "FlashMHFForQuestionAnswering"):
        assert name in source and name in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded).__name__ == "FlashMHFForTokenClassification"


def test_training_operations_of_grouped_heads():
    """Every head of a group multiplies the weights it shares: as many operations as without groups."""
    count = lambda **settings: training_flops_per_token(  # noqa: E731
        transformers.AutoModelForCausalLM.from_config(preset("flashmhf-tiny").config(**settings)), 128
    )
    assert count(ffn_num_kv_heads=1) == count()
