"""The transformer, its operations, sampling noise, checkpoints and weight buffers. No Ray."""
