"""The parts that several trainers are built of: the methods that scripts know, and the refusals."""
