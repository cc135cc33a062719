"""A bundle as a served model: the store, versions as device tensors, policies, the experts' forward, the plug-in.

Of moepack it imports `moepack.pack` and `moepack.families` alone: a server needs neither quantisers nor data sets.
"""
