"""Models that torch exported to programs; imported only when such a model is loaded."""
