"""Options of every section of the configuration, and the names used there: strategies, drafters, formats.

Imports nothing of Paceline, so every other package may import it. `launch.config` loads, checks and shows a
configuration.
"""
