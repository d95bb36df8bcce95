"""One engine over several ranks, each a process with its part of the model and of the KV cache.

Rank 0 is the engine process: it schedules, drafts, draws and answers. The others, its followers, run the same forward
of each step over their parts. What a step needs travels to them as small arrays; where sums meet, tensors go through a
process group (`models.tensor_parallel`). No follower holds a request, so none has to be told what a draw meant.
"""
