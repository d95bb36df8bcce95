"""What crosses a process or a package: requests, rollouts, commands, grades, training sequences, coordinator events.

Data only, no behaviour beyond derived properties. Read this room first: it says what every part sends and receives.
"""
