"""The arguments of trainers."""
