"""One model over several ranks: the leader runs the engine, the others follow its plans."""
