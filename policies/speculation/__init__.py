"""Which drafter, how deep, how wide, when, and when not at all: pure decisions from counts and seconds."""
