"""What the user calls, under TRL's own module names."""
