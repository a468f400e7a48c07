"""Byte-level BPE tokenizers: trained on the data at hand, or loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flashmhf.models.loading import of_known_class

from .errors import DataError, OptionError

END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"  # ids 0 and 1, as in the GPT-NeoX tokenizer that the paper uses
SMALLEST = 258  # all bytes and both special tokens
TRAINING_CHARACTERS = 100_000_000  # more changes a vocabulary of 50k hardly
# The trainer takes a run without spaces, or of spaces, for one word, and its time is quadratic in the length of a word.
LONGEST_WORD = 256


def train(texts: Iterable[str], vocab_size: int, bar: bool = False) -> PreTrainedTokenizerFast:
    """Return a BPE of at most ``vocab_size`` tokens from the first 100 M characters. Raises OptionError below 258."""
    if vocab_size < SMALLEST:
        raise OptionError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {SMALLEST}")
    tokenizer = Tokenizer(models.BPE())
    long_words = pre_tokenizers.Split(Regex(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([long_words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=bar,
    )  # fmt: skip
    tokenizer.train_from_iterator(_limited(texts), trainer)
    tokenizer.pre_tokenizer = byte_level
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING},
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def _limited(texts: Iterable[str]) -> Iterable[str]:
    left = TRAINING_CHARACTERS
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def load(name: str):
    """A tokenizer by directory, tokenizer.json or name. Raises DataError without it or an end-of-text token."""
    name = os.path.expanduser(name)
    try:
        single = Path(name).is_file()
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=name) if single else of_known_class(AutoTokenizer, name)
    except Exception as error:  # the library raises whatever its parsers do
        raise DataError(f"no tokenizer could be loaded from {name!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        if END_OF_TEXT not in tokenizer.get_vocab():
            raise DataError(f"the tokenizer {name!r} names no end-of-text token and has no {END_OF_TEXT!r}")
        tokenizer.eos_token = END_OF_TEXT
    if tokenizer.pad_token_id is None and PADDING in tokenizer.get_vocab():  # a bare tokenizer.json names no roles
        tokenizer.pad_token = PADDING
    return tokenizer


def token_numbers(tokenizer) -> int:
    """Return the largest token number plus 1. It is more than the number of tokens if some stand for none."""
    return max(tokenizer.get_vocab().values()) + 1
