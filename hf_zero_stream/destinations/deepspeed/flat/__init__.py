"""Parameters that are born in the flat buffers that ZeRO stages 1 and 2 ask for when training begins."""
