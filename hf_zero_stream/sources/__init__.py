"""Sources of bytes: byte ranges of files, read here or by another rank."""
