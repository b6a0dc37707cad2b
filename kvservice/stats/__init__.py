"""What the service counts of itself, and the documents made of it."""
