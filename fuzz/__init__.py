"""Coverage-guided fuzzing of what reads untrusted files; see README.md."""
