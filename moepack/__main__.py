"""Run the command line: `python -m moepack`."""

from .cli import main

main()
