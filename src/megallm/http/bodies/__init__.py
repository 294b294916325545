"""Requests as they come in: schemas, checks, and what they become for the engine."""
