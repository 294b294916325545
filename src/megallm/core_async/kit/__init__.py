"""Structured-concurrency parts over anyio: actors, their supervisor, outboxes, gates. Knows no LLM."""
