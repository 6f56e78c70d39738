"""Files of rows that a command reads and writes again with something beside them."""
