"""The front ends as processes, and their line to the engine."""
