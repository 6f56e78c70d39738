"""Checkpoint folders: written whole or not at all, found, checked and resumed from."""
