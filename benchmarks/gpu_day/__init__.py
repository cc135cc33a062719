"""One run on a machine with a CUDA GPU, and what a model of bandwidth and issue slots predicts of it beforehand."""
