"""Check that no bit of one document of a batch reaches another."""
