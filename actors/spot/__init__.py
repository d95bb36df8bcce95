"""Drafter training in a process of its own beside a rollout engine. No Ray here; `actors.rollout_worker` owns it."""
