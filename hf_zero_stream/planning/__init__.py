"""The copy plan between two maps of bytes, the checkpoint's and that of a rank's memory: pure data, no I/O."""
