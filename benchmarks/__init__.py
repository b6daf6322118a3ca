"""Benchmarks: ``python -m benchmarks`` prints them all."""
