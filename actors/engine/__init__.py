"""Rollout engines: one protocol (types), a process around them (process), the native backend (native)."""
