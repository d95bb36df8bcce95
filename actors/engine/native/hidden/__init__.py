"""Hidden states of verified tokens: the most recent ones for drafters, recordings of sequences for their training."""
