"""Data types that cross process or package boundaries: requests, rollouts, commands, grades, training sequences,
coordinator events.

Data only, no behaviour beyond derived properties. Read this package first: it defines what every part sends and
receives.
"""
