"""Ray actors, thin; and beside them, without Ray: engine, training, data, rewards."""
