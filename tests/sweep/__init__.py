"""Every model type of transformers that can be built tiny, loaded plain, streamed and by stock, and compared."""
