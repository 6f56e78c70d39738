"""Training scripts: what `trl-jax NAME` runs."""
