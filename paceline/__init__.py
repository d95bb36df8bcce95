"""Paceline from a script or a notebook: `paceline.train("config.yaml", "run.steps=20", rewards=[right])`.

Only exports names; runs are identical to those of the command.
"""

from launch.config import Config, ConfigError, load_config
from launch.errors import PacelineError
from launch.python_api import Run, evaluate, train

__all__ = ["Config", "ConfigError", "PacelineError", "Run", "evaluate", "load_config", "train"]
