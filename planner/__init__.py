"""Tools that predict a run instead of doing it: simulate, calibrate, plan-step, plan-graphs.

Imports the rest of Paceline; only the command line imports it.
"""
