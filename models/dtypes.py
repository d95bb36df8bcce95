"""The dtypes of weights and hidden states, as torch knows them. Owns both directions of the table."""

import torch

from models.manifest import ITEM_BYTES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
