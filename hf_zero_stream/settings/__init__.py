"""Settings of the user, the blocks in which they apply, and the ranks that a launcher announces."""
