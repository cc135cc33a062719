"""The choice of a version for every expert under a budget in bytes or bits. Pure: numbers in, decisions out."""
