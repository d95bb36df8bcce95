"""A supervisor and its child process: the socket between them, and the child's life. No torch, no Ray, any payload."""
