"""Pure decisions about a trained drafter: when to train it, and whether new weights stay. Owns their options."""
