"""Computations of a language model's head: logits, and numbers of them where tokens are read."""
