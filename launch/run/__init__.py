"""One run: its parts, the loop of RL steps, evaluation, warm start, and the rules of a resume."""
