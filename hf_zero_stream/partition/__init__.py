"""The destination side: where a rank's share of each parameter lives."""
