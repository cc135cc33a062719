"""Greedy texts and perplexity of exports, as the libraries that read them give them, against the bundle's own."""
