"""Environments: what answers a model's turns. A user's class or tools, played in child processes; knows nothing of
Ray."""
