"""Side-by-side measurements against TRL. Run as modules: `python -m benchmarks.real_curve --help`."""
