"""The engine's actors: each owns one piece of state and is its only writer."""
