"""Training state: everything that training needs to go on, at any number of ranks."""
