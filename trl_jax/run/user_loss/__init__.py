"""A script's own compute_loss."""
