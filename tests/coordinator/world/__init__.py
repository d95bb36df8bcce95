"""A simulated cluster around the real coordinator and members: virtual time, lost messages, killed workers."""
