"""What a model family needs beyond transformers: which of its classes a checkpoint is, layouts that do not go through
its experts interface, and what a checkpoint has beside the model.

Shared by the build and the server, which so agree on every module's name. Knows nothing of bundles.
"""
