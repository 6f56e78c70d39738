"""The tables of arguments, one a trainer: a line for each field says how it is handled."""
