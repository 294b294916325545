"""One rank's device work, all of it on that rank's one thread. Never awaits."""
