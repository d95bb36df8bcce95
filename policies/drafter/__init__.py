"""Pure decisions about a trained drafter: when it is trained, whether new weights stay. Owns their options."""
