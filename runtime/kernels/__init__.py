"""Device code: from packed bytes to numbers. Imports nothing of moepack but `pack`."""
