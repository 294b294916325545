"""Measurements of megallm: `python -m benchmarks SUITE`, from the checkout's root."""
