"""Reports of loads and saves, in seconds, bytes and memory: as data, as tables, and while they run."""
