"""Run `python -m launch ...` as `paceline ...`."""

from launch.commands.cli import main

if __name__ == "__main__":
    main()
