"""What ranks hold of a model: which of its elements lie in their memory, and what trains them."""
