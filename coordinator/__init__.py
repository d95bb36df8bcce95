"""Reserved for the coordinator of the spot trainer (BUSY, IDLE, TRAINING): nothing needs one before that trainer."""
