"""How much divergence an encoding costs at its bytes: moepack's, those of others, and ideas that no bundle holds."""
