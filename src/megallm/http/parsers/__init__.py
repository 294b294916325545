"""Incremental parsers of a model's output: reasoning and tool calls taken out of the text. Pure."""
