"""What a step costs on a GPU, and whether a configuration fits into its memory: arithmetic over shapes, no torch."""
