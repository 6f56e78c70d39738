"""Programs of ATen operations, run on JAX: `program` says what one is, `run` runs it, the rest are the operations."""
