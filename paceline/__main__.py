"""`python -m paceline ...` is `paceline ...`."""

from launch.commands.cli import main

if __name__ == "__main__":
    main()
