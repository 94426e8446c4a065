"""What loads and saves did, in seconds, bytes and memory: as data, as tables, and while they run."""
