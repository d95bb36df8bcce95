"""The one error of this package."""


class DataError(ValueError):
    """Unusable data, tokenizer or template; the message names the file, line or key and the remedy."""
