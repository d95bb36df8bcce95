"""The coordinator: which idle workers train the drafter together, and when they stop (docs/concepts/coordinator.md)."""
