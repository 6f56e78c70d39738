"""Utilities without model or trainer knowledge: files, secrets, text, torch's random numbers, shared containers."""
