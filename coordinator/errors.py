"""What keeps a coordinator, or who speaks to it, from its start."""


class SetupError(ValueError):
    """An option, a key file, a credential or a file of the run's folder cannot be used; the message names it."""
