"""Checkpoints that a pickle describes: ``torch.save``, torch.distributed.checkpoint, DeepSpeed's ZeRO. None is run."""
