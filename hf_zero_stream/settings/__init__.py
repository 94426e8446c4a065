"""What a user and a launcher have said: settings, where they apply, and the ranks that there will be."""
