"""A bundle as a served model: the store, versions as device tensors, policies, the experts' forward, the plug-in.

Imports `moepack.pack` and nothing else of moepack: a server needs neither quantisers nor data sets.
"""
