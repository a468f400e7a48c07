"""Benchmarks of flashmhf, run from a checkout: ``python -m benchmarks.NAME``."""
