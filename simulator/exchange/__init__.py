"""Other tools' files: read from them, write to them."""
