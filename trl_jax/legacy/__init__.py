"""Names and arguments of TRL before 1.0; imported only when a script uses one."""
