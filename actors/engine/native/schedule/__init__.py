"""Scheduling of the next engine step: requests, slots, blocks, shared prompts."""
