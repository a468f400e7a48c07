"""What a training run and its data raise. Messages name options as :class:`flashmhf_recipes.options.Options` does."""

from __future__ import annotations

ADVICE = "try a lower learning_rate or a longer warmup"


class OptionError(ValueError):
    """An option, or several together, that a command or a run cannot have."""


def refuse(wrong: object, message: str) -> None:
    """Raise OptionError if something is ``wrong``. A message names the option, what it got and what is supported."""
    if wrong:
        raise OptionError(message)


class DataError(ValueError):
    """The data cannot be trained or evaluated on; the message names the file."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why."""
