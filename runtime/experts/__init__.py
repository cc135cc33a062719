"""What runs in a forward pass: the experts' handles, their forward, and which kernel runs it."""
