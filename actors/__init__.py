"""Ray actors. The subpackages work without Ray: engine, training, data, rewards, environments, spot."""
