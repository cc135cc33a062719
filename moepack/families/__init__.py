"""What model families need besides transformers: a checkpoint's class, adapted experts, the names of MTP layers.

The build and the server share this package, so that they agree on every module's name. It does not depend on bundles.
"""
