"""What DeepSpeed keeps in memory: partitions, masters, moments."""
