"""The tables of README.md, benchmarks/README.md and docs/, a function each, from the records."""
