"""A bundle as a served model: the store, versions as device tensors, policies, the experts' forward, the plug-in.

Of moepack's other packages it imports `pack` and `families` alone: a server needs neither quantisers nor data sets.
"""
