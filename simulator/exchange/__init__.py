"""What other tools write and read, as descriptions and back."""
