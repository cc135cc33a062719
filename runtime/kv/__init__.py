"""KV caches: their bytes, and layers that append in place."""
