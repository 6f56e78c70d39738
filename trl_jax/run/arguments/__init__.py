"""The arguments of a run: BaseConfig, what it adds for JAX, older names, and the optimizer they choose."""
