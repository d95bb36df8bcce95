"""Ray actors, and below them, without Ray: engine, training, data, rewards, environments, spot."""
