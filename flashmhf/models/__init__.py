"""The paper's language models (section 4) on transformers: a Llama whose feed-forward network is chosen by name.

Importing this package registers ``FlashMHFConfig`` and its models with transformers' auto classes, and has models in
which ``replace_ffn`` and FP8 put networks saved and loaded with them. Needs the extra ``flashmhf[lm]``.
"""

from .. import extras

extras.require("flashmhf.models", "transformers", "5.17")

import transformers  # noqa: E402  (the line above says what is missing)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from . import building, modeling  # noqa: E402, F401  (building wraps two methods)
from .configuration import AUTO_CLASSES, FFN_TYPES, FlashMHFConfig  # noqa: E402
from .loading import load  # noqa: E402
from .modeling import (  # noqa: E402
    FlashMHFForCausalLM,
    FlashMHFForQuestionAnswering,
    FlashMHFForSequenceClassification,
    FlashMHFForTokenClassification,
    FlashMHFModel,
    FlashMHFPreTrainedModel,
)
from .quantization import FlashMHFFp8Config  # noqa: E402

transformers.AutoConfig.register(FlashMHFConfig.model_type, FlashMHFConfig, exist_ok=True)
for _auto, _model in AUTO_CLASSES.items():
    if _auto != "AutoConfig":
        getattr(transformers, _auto).register(FlashMHFConfig, getattr(modeling, _model), exist_ok=True)
# transformers' Trainer shifts the labels of a smoothed loss (label_smoothing_factor) only for the classes named in this
# table; without the entry a model would learn to repeat its input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FlashMHFConfig.model_type] = FlashMHFForCausalLM.__name__

__all__ = [
    "FFN_TYPES", "FlashMHFConfig", "FlashMHFFp8Config", "FlashMHFForCausalLM", "FlashMHFForQuestionAnswering",
    "FlashMHFForSequenceClassification", "FlashMHFForTokenClassification", "FlashMHFModel", "FlashMHFPreTrainedModel",
    "load",
]  # fmt: skip
