"""Print how many processes the suite runs in: one more than there are cores (tests wait for children), at most four."""

import os

cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
print(min(4, cores + 1))
