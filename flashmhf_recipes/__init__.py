"""Recipes on top of flashmhf: language-model training, evaluation and generation, the first-run report, the command
``flashmhf``."""
