"""The ranks of a process group: where they run, who of them lives, and how they come together and agree."""
