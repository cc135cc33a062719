"""An edit for every rule of FORMAT.md, that breaks it and nothing else, with the kind of problem that it is.

What is edited is signed again where a digest would find it, so that the rule is tested. A module has the edits of one
part of a bundle.
"""

from .extents import EXTENTS
from .files import FILES
from .headers import HEADERS
from .manifest import MANIFESTS
from .names import Do
from .released import RELEASED
from .tables import TABLE_EDITS

__all__ = ["EDITS", "MANIFEST_EDITS", "RELEASED"]

EDITS: dict[str, tuple[Do, str]] = {}
for _group, _edits in (
    ("manifest", MANIFESTS), ("files", FILES), ("headers", HEADERS), ("extents", EXTENTS), ("tables", TABLE_EDITS),
):  # fmt: skip
    EDITS |= {f"{_group}: {name}": edit for name, edit in _edits.items()}
MANIFEST_EDITS = {f"manifest: {name}" for name in MANIFESTS}
