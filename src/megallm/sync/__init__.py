"""The sync facade: blocking calls over an engine on a private loop thread."""
