"""torch's dtypes of weights and hidden states by name, and names by dtype."""

import torch

from models.manifest import ITEM_BYTES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
