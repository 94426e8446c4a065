"""The copy plan between a map of bytes (the checkpoint) and another (what a rank owns): pure data, no I/O."""
