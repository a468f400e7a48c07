"""transformers' own OpenAI server with the models of this package."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path

from flashmhf_recipes import evaluation
from flashmhf_recipes.tokenizer import load as load_tokenizer

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
    fp8: bool = False,
    projections: bool = True,
) -> None:
    """Serves the model of a run, a checkpoint or a saved model under ``name`` until a signal ends the process.

    ``fp8`` serves it with its FlashMHF networks in FP8, ``projections`` their W_in and W_out, too: from a temporary directory, since the
    server quantises by bitsandbytes only.

    Says so where the tokenizer has no chat template: /v1/chat/completions then has nothing to make a prompt with; /v1/completions has
    no need of one. Raises FileNotFoundError where there is no model, ModuleNotFoundError without transformers' serving packages, and
    with ``fp8`` what :func:`flashmhf_recipes.evaluation.load` raises.
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
    except ImportError as error:
        raise _without_server() from error
    with contextlib.ExitStack() as stack:
        if fp8:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flashmhf-fp8-"))
            evaluation.save_fp8(location, Path(folder), device=device, dtype=dtype, projections=projections)
            location = folder
        try:
            Serve(force_model=location, device=device, dtype=dtype, host=host, port=port, continuous_batching=continuous_batching)
        except ImportError as error:  # the class imports its packages when it is made
            raise _without_server() from error


def _without_server() -> ModuleNotFoundError:
    return ModuleNotFoundError("flashmhf serve needs transformers' server: pip install 'transformers[serving]'")
