"""Attention: `attend` picks the computation for the layout and the platform, the modules here call it."""
