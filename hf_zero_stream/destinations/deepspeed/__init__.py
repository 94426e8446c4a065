"""DeepSpeed's memory: partitions, master copies, swap files; the only package that touches its private surface."""
