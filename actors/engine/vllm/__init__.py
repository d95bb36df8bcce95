"""vLLM, stock and unforked, as the rollout engine. The only package that imports vllm. See docs/howto/vllm.md."""
