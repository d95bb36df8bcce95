"""Rollout engines: what backends share (batch), the process around one (process, child), and native and vllm."""
