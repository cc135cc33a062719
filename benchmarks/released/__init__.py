"""What allocation and `hotness` gain below a released version of 4 or 8 bits."""
