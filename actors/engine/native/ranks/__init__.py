"""One engine over several ranks, each a process with its part of the model and of the KV cache.

Rank 0 is the engine process: it schedules, drafts, draws and answers. The others, its followers, run each step's
forward over their parts. They receive a step's inputs as small arrays; tensors are summed through a process group
(`models.tensor_parallel`). Followers hold no requests and need no draws.
"""
