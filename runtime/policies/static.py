"""`static`: a map that never changes: one version, a file, or the allocation in the bundle's manifest."""

from .contract import Entry
from .maps import static_map

ENTRY = Entry("static", "static, static:VERSION, static:FILE.json, static:allocation", parse=str, versions=static_map)
