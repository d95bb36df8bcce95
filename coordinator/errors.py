"""Errors that keep a coordinator or its clients from starting."""


class SetupError(ValueError):
    """An option, a key file, a credential or a file of the run's folder cannot be used; the message names it."""
