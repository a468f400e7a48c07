"""transformers' own OpenAI server with the models of this package."""

from __future__ import annotations

import logging

from ..lm import evaluation
from ..lm.tokenizer import load as load_tokenizer
from .plugins import into_transformers

logger = logging.getLogger(__name__)


def serve(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    host: str = "localhost",
    port: int = 8000,
    continuous_batching: bool = False,
) -> None:
    """Serves the model of a run, a checkpoint or a saved model under ``name`` until a signal ends the process.

    Says so where the tokenizer has no chat template: /v1/chat/completions then has nothing to make a prompt with; /v1/completions has
    no need of one. Raises FileNotFoundError where there is no model, ModuleNotFoundError without transformers' serving packages.
    """
    location = evaluation.locate(name)
    if load_tokenizer(location).chat_template is None:
        logger.warning(
            "the tokenizer of %s has no chat template: /v1/chat/completions fails, /v1/completions works; "
            "give one with flashmhf train --chat-template, or as chat_template.jinja in the model's directory",
            name,
        )
    into_transformers()
    try:
        from transformers.cli.serve import Serve

        Serve(force_model=location, device=device, dtype=dtype, host=host, port=port, continuous_batching=continuous_batching)
    except ImportError as error:
        raise ModuleNotFoundError("flashmhf serve needs transformers' server: pip install 'transformers[serving]'") from error
