"""The paper's language models (section 4) on transformers: a Llama whose feed-forward network is chosen by name.

Importing this package registers ``FlashMHFConfig`` and ``FlashMHFForCausalLM`` with transformers' auto classes. Needs the extra
``flashmhf[lm]``.
"""

from .. import extras

extras.require("flashmhf.lm", "transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402  (the line above says what is missing)

from .configuration import FFN_TYPES, FlashMHFConfig  # noqa: E402
from .modeling import FlashMHFForCausalLM, FlashMHFModel, FlashMHFPreTrainedModel  # noqa: E402
from .replaced import load_replaced  # noqa: E402

AutoConfig.register(FlashMHFConfig.model_type, FlashMHFConfig, exist_ok=True)
AutoModel.register(FlashMHFConfig, FlashMHFModel, exist_ok=True)
AutoModelForCausalLM.register(FlashMHFConfig, FlashMHFForCausalLM, exist_ok=True)

__all__ = ["FFN_TYPES", "FlashMHFConfig", "FlashMHFForCausalLM", "FlashMHFModel", "FlashMHFPreTrainedModel", "load_replaced"]
