"""The native rollout engine: scheduler, KV blocks, runner, sampler, verification. See docs/engine.md."""
