"""Runs an untrusted program and its tests in two processes that share only a pipe of data.

`main` starts them, each confined by `layers`. `candidate` runs the program and never sees a test; `judge` runs the
tests and never executes the program's objects; `wire` is the data format between them. actors.rewards.sandbox runs this
as a separate process, under the package name `confinement`, so that nothing else of Paceline is imported.
"""
