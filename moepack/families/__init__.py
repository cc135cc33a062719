"""Model families beyond transformers: a checkpoint's class, layouts outside its experts interface, MTP layers.

The build and the server share this, so that they agree on every module's name. Independent of bundles.
"""
