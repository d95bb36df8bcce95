"""Where a network runs. The one place that turns a `device` setting into a device of this machine."""

import torch


def choose_device(wanted: str, key: str) -> str:
    """cpu or cuda. `wanted`: auto, cpu or cuda, as the setting `key` says. RuntimeError if this process has none."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{key}=cuda, but there is no CUDA device for this process: use auto or cpu; on a cluster GPUs are "
            "given by cluster.gpus_per_worker and cluster.gpus_per_learner"
        )
    return wanted
