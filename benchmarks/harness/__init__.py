"""Benchmarks: how fast and how small FlashMHF is beside what one would use instead (``python -m flashmhf_recipes
bench``).

One setup per subject gives the correctness check, the memory and the time: a subject whose check is red gets no number.
"""
