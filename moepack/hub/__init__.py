"""Publish bundles to a Hugging Face Hub, and fetch them: whole, by version, or as a budget allows.

Any endpoint of huggingface_hub works (HF_ENDPOINT). A repository is not trusted: names, sizes and digests are checked
against the manifest, and the manifest against the format.
"""

from .download import pull
from .errors import HubError
from .exported import PROGRAMS, pull_for
from .upload import push

__all__ = ["PROGRAMS", "HubError", "pull", "pull_for", "push"]
