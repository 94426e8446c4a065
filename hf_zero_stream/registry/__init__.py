"""What plug-ins bring, as data: which there are, and what a row of the table of replaced functions is."""
