"""Drafters and their training. Engines call them through the interface in `protocol`."""
