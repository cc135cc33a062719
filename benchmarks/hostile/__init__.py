"""What bundles and released checkpoints that somebody made to break it do to moepack.

Cases run in forked children, which have none of their parent's threads: a product on two would wait for the other for
ever. So torch must not be imported before this package.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
