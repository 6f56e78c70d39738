"""Models: an `Arch` describes the architecture, a decoder or encoder implements it, and a head gives outputs."""
