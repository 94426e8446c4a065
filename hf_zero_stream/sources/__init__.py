"""Where bytes come from: byte ranges of files, read here or by another rank."""
