"""Drafter training in a separate process beside a rollout engine. No Ray here; `actors.rollout_worker` owns it."""
