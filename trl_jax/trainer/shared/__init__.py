"""What several trainers are built of: the methods that scripts know, in parts, and what trainers refuse."""
