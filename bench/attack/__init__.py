"""Attacks on kvaudit's borders, one section per file: ``python -m bench.attack``, results in docs/results/attack.md."""
