"""What a batch says: its documents, positions and labels."""
