"""What the rooms of `moepack` share: opening models, progress, memory figures, clusters and the version."""
