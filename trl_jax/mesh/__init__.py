"""Device meshes and multi-process runs."""
