"""One run: its parts, the loop of RL steps, evaluation, warm start, what a resume may change."""
