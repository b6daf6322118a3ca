"""Published measurements of training runs, re-run through the simulator."""
