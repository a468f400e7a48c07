"""What a training run and its data raise. Messages name options as :class:`flashmhf_recipes.options.Options` does."""

from __future__ import annotations

ADVICE = "try a lower learning_rate or a longer warmup"


class OptionError(ValueError):
    """An option, or several together, that a command or a run cannot have."""


class DataError(ValueError):
    """The data cannot be trained or evaluated on; the message names the file."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why."""
