"""From rows to arrays: text to token ids, the order of rows, and the layout of a batch."""
