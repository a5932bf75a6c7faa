"""Model families: one folder per family, and ``common`` for what they share."""
