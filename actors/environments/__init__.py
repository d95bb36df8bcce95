"""Environments, which respond to a model's turns: a user's class or tools, run in child processes. No Ray."""
