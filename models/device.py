"""Where a network runs. The one place that turns a `device` setting into a device of this machine."""

import torch


def choose_device(wanted: str, key: str) -> str:
    """cpu or cuda. `wanted`: auto, cpu or cuda, as the setting `key` says; RuntimeError if it is not here."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"{key}=cuda, but this machine has no CUDA device: use auto or cpu")
    return wanted
