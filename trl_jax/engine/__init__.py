"""Turns a loss into a run. Knows no model and no text: it sees (params, batch) and a function."""
