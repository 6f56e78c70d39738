"""Side-by-side measurements against TRL. Run as modules: `python -m compat_tests.bench.real_curve --help`."""
