"""Which version every expert gets under a budget in bytes or bits, for maps that never change. Pure."""
