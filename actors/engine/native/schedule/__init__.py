"""What runs in the next engine step: requests, slots, blocks, shared prompts."""
