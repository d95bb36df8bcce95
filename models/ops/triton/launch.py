"""Launches the kernels on CUDA tensors: the CUDA implementations of the operators, one function each.

Imported at the first launch. Until a kernel stands here the oracle computes in its place.
"""

from models.ops.triton.operators import _ON_CPU

rms_norm = _ON_CPU["rms_norm"]
add_rms_norm = _ON_CPU["add_rms_norm"]
rope_write = _ON_CPU["rope_write"]
swiglu = _ON_CPU["swiglu"]
paged_attention = _ON_CPU["paged_attention"]
linear = _ON_CPU["linear"]
sample = _ON_CPU["sample"]
sample_topk = _ON_CPU["sample_topk"]
cutoff = _ON_CPU["cutoff"]
