"""Configuration: one typed tree from a YAML file and dotted overrides. Imports neither torch nor ray."""

from config.tree import Config
from launch.config.check import check_values
from launch.config.environment import check_environment, validate_paths
from launch.config.issues import ConfigError, Issue
from launch.config.load import Loaded, load_config

__all__ = [
    "Config",
    "ConfigError",
    "Issue",
    "Loaded",
    "check_environment",
    "check_values",
    "load_config",
    "validate_paths",
]
