"""The array work around a forward pass, in numpy (reference) and native (kernels), and the accept rule."""
