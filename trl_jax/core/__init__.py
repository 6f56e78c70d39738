"""Facts every room may use: arguments, errors, torch's random numbers. Imports neither jax nor transformers."""
