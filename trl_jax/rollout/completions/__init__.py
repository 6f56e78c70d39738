"""The table of completions that is logged: printed, written to files, given to trackers and to the Hub."""
