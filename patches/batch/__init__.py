"""What a batch says: its documents, positions, labels and cache."""
