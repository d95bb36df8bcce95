"""The forward pass of an engine step: the batch as tensors, CUDA graphs, packed weights, rejection sampling."""
