"""Print how many processes the suite runs in: one more than there are cores, as tests wait for children; four at most."""

import os

cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
print(min(4, cores + 1))
