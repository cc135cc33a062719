"""Publishing bundles to a Hugging Face Hub and fetching them, whole, by version or by what fits a budget.

Works with any endpoint that huggingface_hub speaks to (HF_ENDPOINT). What a repository holds is never trusted: names,
sizes and digests are checked against the manifest, and the manifest against the format.
"""

from .download import pull
from .errors import HubError
from .upload import push

__all__ = ["HubError", "pull", "push"]
