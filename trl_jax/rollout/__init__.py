"""Rows that are made: prompts, what a policy writes for them, and what that is worth."""
