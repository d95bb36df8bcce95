"""The learner, without Ray: trainer, FSDP2, optimizers, checkpoints. See docs/learning.md."""
