"""What those who write a tier of their own can test it with."""
