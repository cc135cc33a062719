"""Ways of quantising experts beyond the build's own, against it, by divergence at equal bytes."""
