"""The native rollout engine: scheduler, KV blocks, runner, verification. See docs/concepts/engine.md."""
