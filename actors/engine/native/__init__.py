"""The native rollout engine: scheduler, KV blocks, runner, verification. See docs/engine.md."""
