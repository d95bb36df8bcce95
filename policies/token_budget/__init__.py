"""One token budget per RL step (DUET): how many rollouts each prompt gets, and when a hopeless one is given up.

Owns the formulas and the statistics of prompts and lengths. Never samples; independent of engines.
"""
