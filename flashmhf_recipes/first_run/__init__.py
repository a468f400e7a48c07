"""The command ``flashmhf`` and what it does without a sub-command: check, compare, train a tiny language model, report."""
