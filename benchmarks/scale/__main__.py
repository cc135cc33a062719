"""`python -m benchmarks.scale`. Apart from command.py, whose functions a spawned process must be able to import."""

from .command import main

if __name__ == "__main__":
    main()
