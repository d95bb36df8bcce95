"""The one error of this package."""


class DataError(ValueError):
    """Data, tokenizer or template that cannot be used; the message names the file, line or key and the remedy."""
