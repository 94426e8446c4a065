"""Scripts to start from, and the demonstration."""
