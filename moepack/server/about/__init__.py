"""What the server says of itself: models, health, load, metrics, its schema, and the page."""
