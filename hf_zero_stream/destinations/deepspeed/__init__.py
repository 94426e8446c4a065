"""Destinations in DeepSpeed's memory: partitions, swap files, engines that train."""
