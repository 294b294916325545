"""What goes out: text, tokens and log-probs as JSON objects and as events."""
