"""Values that DeepSpeed keeps in memory: partitions, masters, moments."""
