"""Holdings: the elements of a model that lie in this rank's memory, and the optimizers that train them."""
