"""The options of every section of the configuration, and the names they are made of: strategies, drafters, formats.

The ground floor: imports nothing of Paceline, so every other package may read it. Loading, checking and showing a
configuration is `launch.config`.
"""
