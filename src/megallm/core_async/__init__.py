"""The engine: an async core of structured-concurrency actors. Read `engine.py` first."""
