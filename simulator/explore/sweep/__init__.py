"""Many scenarios at once: a grid of settings, simulated by many workers, kept as a table."""
