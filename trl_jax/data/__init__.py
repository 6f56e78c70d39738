"""From dataset rows to arrays: tokenization, row order, and batch layout."""
