"""The OpenAI-compatible server: Quart on Hypercorn."""
