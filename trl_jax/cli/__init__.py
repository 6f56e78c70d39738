"""The `trl-jax` command, and the patches with which `python -m trl_jax` runs TRL scripts."""
