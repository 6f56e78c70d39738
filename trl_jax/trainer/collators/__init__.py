"""TRL's data collators, for scripts that call them; trainers lay steps out without them."""
