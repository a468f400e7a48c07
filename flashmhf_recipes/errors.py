"""What a training run raises. Messages name options as the library does; the command line shows its flags instead."""

from __future__ import annotations

from collections.abc import Callable


class _Names(dict):
    """Maps the placeholders of a message: given values, and any other placeholder as the name of an option."""

    def __init__(self, values: dict, spell: Callable[[str], str]):
        super().__init__(values)
        self.spell = spell

    def __missing__(self, name: str) -> str:
        return self.spell(name)


class _OptionNamingError(Exception):
    """An error whose message names options: ``"{micro_batch} is {value}"`` names the option micro_batch and formats ``value``."""

    def __init__(self, template: str, **values: object):
        self.template, self.values = template, values
        super().__init__(self.message(str))

    def message(self, spell: Callable[[str], str]) -> str:
        """The message with every option's name as ``spell`` writes it."""
        return self.template.format_map(_Names(self.values, spell))


class OptionError(_OptionNamingError, ValueError):
    """An option, or options together, that a run cannot have."""


class OccupiedError(_OptionNamingError, FileExistsError):
    """The output directory holds something that a new run would overwrite."""


class TrainingError(_OptionNamingError, RuntimeError):
    """Training cannot go on; the message says why."""
