"""Data: prompts and demonstrations from files, tokenised and ordered. No Ray, no torch."""

from actors.data.endings import check_stop_tokens, end_tokens, note_end_tokens
from actors.data.errors import DataError
from actors.data.order import PromptOrder
from actors.data.prompts import (
    LoadReport,
    Prompt,
    PromptSet,
    load_demonstrations,
    load_prompts,
    load_set,
)
from actors.data.tokenizers import check_vocabulary, load_tokenizer

__all__ = [
    "DataError",
    "LoadReport",
    "Prompt",
    "PromptOrder",
    "PromptSet",
    "check_stop_tokens",
    "check_vocabulary",
    "end_tokens",
    "load_demonstrations",
    "load_prompts",
    "load_set",
    "load_tokenizer",
    "note_end_tokens",
]
