"""`model.generate`: transformers' arguments in, its sequences out; `trl_jax.generation` does the work."""
