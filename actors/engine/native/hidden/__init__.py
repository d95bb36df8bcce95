"""Hidden states of verified tokens: the latest ones for drafters, and recorded sequences for drafter training."""
