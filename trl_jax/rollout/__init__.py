"""Rows that a run makes itself: prompts -> completions -> rewards -> advantages -> examples. Knows no optimizer."""
