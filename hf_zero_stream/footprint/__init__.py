"""What a rank's memory will hold in training, computed and not measured."""
