"""Rollout engines: the code shared by backends (batch), the child process (process, child), and native and vllm."""
