"""Tools that predict a run instead of executing it: simulate, calibrate, plan-step, plan-graphs.

Imports the rest of Paceline; only the command line imports it.
"""
