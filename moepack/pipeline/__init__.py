"""From a checkpoint to a bundle: recipes, the stages over a work directory, and the executors that run them."""
