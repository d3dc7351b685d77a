"""What authors of a tier can test it with."""
