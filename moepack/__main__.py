"""`python -m moepack`."""

from .cli import main

main()
