"""The command `trl-jax`."""
