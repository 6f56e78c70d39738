"""Plan a run without running it."""
