"""The array work around a forward pass, slowly (reference) and fast (kernels), and what may be accepted."""
