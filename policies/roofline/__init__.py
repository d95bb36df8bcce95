"""The cost of a step on a GPU, and whether a configuration fits its memory: arithmetic over shapes, no torch."""
