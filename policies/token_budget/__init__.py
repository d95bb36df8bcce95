"""One budget of tokens per RL step (DUET): how many rollouts each prompt gets, and when a hopeless one is given up.

Owns the formulas and what is learned about prompts and lengths; never samples, and knows nothing of engines.
"""
