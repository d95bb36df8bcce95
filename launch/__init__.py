"""The driver: command line, configuration, the training loop, dispatch, observation, reports."""
