"""Tasks: what is learned, each in one file. Nothing else in the package knows which trainer runs."""
