"""The learner, without Ray: trainer, FSDP2, optimizers, checkpoints. See docs/concepts/learning.md."""
