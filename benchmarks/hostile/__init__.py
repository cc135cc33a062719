"""What bundles and released checkpoints that somebody made to break it do to moepack."""
